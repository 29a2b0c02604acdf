"""A row for each run, from its run.json: no checkpoint is read, nothing is written."""

import json
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.runs.headline import Headline
from finetune.runs.run_dir import RunDir, State, find_runs

SORT_KEYS = ("when", "data", "network", "epochs", "accuracy", "seconds", "size", "folder")


@dataclass(frozen=True)
class RunRow:
    """A row of the table of runs.

    Attributes:
        folder: The run's folder.
        state: What the run is doing, or how it has ended.
        began: When it began, in seconds since 1970.
        data: The data folder as the command named it; "" if unknown.
        network: The backbone; "" if unknown.
        epochs: Number of epochs that have ended; of several fits those of the longest.
        result: The accuracy, or the mean average precision if images have several labels; None if nothing was measured.
        seconds: Seconds of its commands; None if unknown.
        size: Bytes on disk.
        command: The command that began it; "" if unknown.
        damage: What is wrong with the record of a damaged run; "" for nothing.
    """

    folder: str
    state: State
    began: float
    size: int
    data: str = ""
    network: str = ""
    epochs: int = 0
    result: Headline | None = None
    seconds: float | None = None
    command: str = ""
    damage: str = ""

    def as_plain(self) -> dict[str, Any]:
        """Return it as plain values for JSON. A mean average precision has the name `mAP`."""
        local = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(self.began))
        result = self.result
        return {
            "folder": self.folder,
            "state": self.state,
            "began": local,
            "data": self.data,
            "network": self.network,
            "epochs": self.epochs,
            "accuracy" if result is None else result.metric: result and result.value,
            "interval": result and (result.low, result.high),
            "num_images": 0 if result is None else result.num_images,
            "split": "" if result is None else result.split,
            "seconds": self.seconds,
            "size": self.size,
            "command": self.command,
            "damage": self.damage,
        }


def run_table(folder: Path, key: str = "when") -> list[RunRow]:
    """Return the runs of `fit` at or beneath a folder.

    Args:
        folder: A folder of runs, or above some, or a run.
        key: One of `SORT_KEYS`: numbers and times are sorted from the highest down, names alphabetically.
    """
    rows = [read_row(run) for run in find_runs(folder)]
    rows.sort(key=lambda row: row.began, reverse=True)
    if key in ("data", "network", "folder"):
        return sorted(rows, key=lambda row: getattr(row, key))

    def value(row: RunRow) -> float:
        if key == "accuracy":
            return -math.inf if row.result is None else row.result.value
        number = getattr(row, {"when": "began"}.get(key, key))
        return -math.inf if number is None else number

    return sorted(rows, key=value, reverse=True)


def read_row(run: RunDir) -> RunRow:
    """Return the row of a run; that of a damaged run has only its place, its size and the damage."""
    size = size_of([run.path])
    damage = run.damage or next((fit.damage for fit in run.fits if fit.damage), "")
    if damage:
        return RunRow(str(run.path), run.state, run.began, size, damage=damage)
    facts = run.facts
    return RunRow(
        folder=str(run.path),
        state=run.state,
        began=run.began,
        size=size,
        data=facts.data or facts.root or "",
        network=facts.network,
        epochs=max(one.facts.epochs for one in (run, *run.fits)),
        result=facts.result,
        seconds=facts.seconds or None,
        command=facts.command,
    )


def size_of(paths: Sequence[Path]) -> int:
    """Return the bytes of files and folders; a file with several names (best.ckpt, last.ckpt) counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for path in paths:
        for file in _files(path):
            with suppress(OSError):  # deleted in the meantime
                status = file.lstat()
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def _files(path: Path) -> list[Path]:
    if path.is_symlink() or not path.is_dir():
        return [path]
    return [Path(folder, name) for folder, _, names in os.walk(path) for name in names]


def as_json(rows: Sequence[RunRow]) -> str:
    """Return the rows as JSON."""
    return json.dumps([row.as_plain() for row in rows], indent=2)
