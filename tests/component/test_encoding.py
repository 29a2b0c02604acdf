"""What an output cannot show is replaced."""

import os
import subprocess
import sys

from paths import ROOT

FOLDER = "straße – 写真"


def test_a_command_does_not_end_at_a_character_that_its_output_lacks(tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "FINETUNE_CACHE": str(tmp_path / FOLDER),
        "PYTHONIOENCODING": "ascii",
    }
    command = [sys.executable, "-m", "finetune", "cache"]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert b"no caches in" in done.stdout and b"stra" in done.stdout and b"?" in done.stdout
