"""Results in a JSON file, one per line. Each is written at once, so that an interrupted benchmark loses none."""

import datetime
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import finetune
from finetune.system.files import replace_text
from finetune.system.machine import num_cores, processor

PROGRAM = str(Path(sys.executable).with_name("finetune"))


def load(path: Path) -> list[dict]:
    """Return the results so far."""
    return json.loads(path.read_text("utf-8")) if path.exists() else []


def save(path: Path, records: Sequence[dict]) -> None:
    """Replace the results in a file."""
    replace_text(path, "[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")


def keep(path: Path, record: dict, fields: Sequence[str] = ("about", "what")) -> None:
    """Add a result with its circumstances, in place of an earlier one with the same values of `fields`."""
    others = [r for r in load(path) if any(r[name] != record[name] for name in fields)]
    save(path, [*others, {**record, **where_and_when()}])
    print(json.dumps(record), flush=True)


def where_and_when() -> dict[str, str]:
    """Return the machine, the version of torch, the commit and the date, which each record has."""
    import torch  # writing documents does not need it

    return {
        "machine": f"{processor()}, {num_cores()} cores",
        "torch": str(torch.__version__),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def commit() -> str:
    """Return the commit that is measured, with a `+` if the tree differs from it; our version without git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe"]
    command += ["--always", "--abbrev=9", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return finetune.__version__
