"""The results of all benchmarks: one JSON file for each month, one record in a line, written at once."""

import datetime
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import finetune
from finetune.system.files import replace_text
from finetune.system.machine import num_cores, processor

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks/records"
PROGRAM = str(Path(sys.executable).with_name("finetune"))

Record = dict[str, Any]


def this_month() -> Path:
    """Return the file of this month."""
    return FOLDER / f"{datetime.date.today():%Y-%m}.json"


def load(benchmark: str, files: Iterable[Path] | None = None) -> list[Record]:
    """Return the records of a benchmark, the oldest first; of all months without `files`."""
    paths = sorted(FOLDER.glob("*.json")) if files is None else files
    records = [record for path in paths for record in _read(path)]
    return [record for record in records if record["benchmark"] == benchmark]


def add(path: Path, record: Record, fields: Sequence[str]) -> None:
    """Add a record to a file, in place of one of the same benchmark with the same values of `fields`."""
    names = ("benchmark", *fields)
    others = [r for r in _read(path) if any(r.get(name) != record[name] for name in names)]
    lines = ",\n".join(map(json.dumps, [*others, record]))
    path.parent.mkdir(exist_ok=True)
    replace_text(path, f"[\n{lines}\n]\n")


def _read(path: Path) -> list[Record]:
    return json.loads(path.read_text("utf-8")) if path.exists() else []


def where_and_when() -> dict[str, str]:
    """Return the machine, the version of torch, the commit and the date, which each record has."""
    import torch  # writing the page does not need it

    return {
        "machine": f"{processor()}, {num_cores()} cores",
        "torch": str(torch.__version__),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def commit() -> str:
    """Return the commit that is measured, with a `+` if the tree differs from it; our version without git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=9", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return finetune.__version__
