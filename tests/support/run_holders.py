"""Another process that holds the lock of a run."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from pathlib import Path
from finetune.runs.run_lock import hold
try:
    hold(Path(sys.argv[1]))
    print("held", flush=True)
    sys.stdin.read()
except ValueError as error:
    print(error)
"""


def another(run: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, run],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
