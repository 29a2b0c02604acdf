"""Results that are added one by one to a file of JSON, a line each: a run that is cut off loses nothing of them."""

import datetime
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import finetune
from finetune.system.files import replace_text
from finetune.system.machine import num_cores, processor


def load(path: Path) -> list[dict]:
    """Return the results so far."""
    return json.loads(path.read_text("utf-8")) if path.exists() else []


def save(path: Path, records: Sequence[dict]) -> None:
    """Write all results in place of those that are there."""
    replace_text(path, "[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")


def where_and_when() -> dict[str, str]:
    """Return what each record says of its circumstances."""
    import torch  # who only writes documents does without

    return {
        "machine": f"{processor()}, {num_cores()} cores",
        "torch": str(torch.__version__),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def commit() -> str:
    """Return which code is measured: the commit, with a `+` where the tree differs from it; our version without git."""
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--abbrev=9",
        "--dirty=+",
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return finetune.__version__
