"""What an output cannot show is replaced."""

import os
import subprocess
import sys

import pytest
from paths import ROOT

FOLDER = "straße – 写真"


@pytest.mark.parametrize(
    "variables", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}]
)
def test_a_command_does_not_end_at_a_character_that_its_output_lacks(variables, tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "FINETUNE_CACHE": str(tmp_path / FOLDER),
        **variables,
    }
    command = [sys.executable, "-m", "finetune", "cache"]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert b"no caches in" in done.stdout and b"stra" in done.stdout and b"?" in done.stdout
    command = [sys.executable, "-m", "finetune", FOLDER]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120)
    assert done.returncode == 2 and b"there is no command" in done.stderr
