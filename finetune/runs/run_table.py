"""A row for each run, from the small files in its folder: no checkpoint is read, nothing is written."""

import csv
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from finetune.data.data_place import place_of
from finetune.runs.best_epoch import MONITORS, chosen_epoch
from finetune.runs.identity import num_folds
from finetune.runs.interpolation_record import METRICS
from finetune.runs.outcome import (
    approximate_interval,
    label_trials,
    mean_precision_interval,
    num_validated,
)
from finetune.runs.result_file import read_result
from finetune.runs.run_lock import is_held
from finetune.runs.run_search import find_runs, start_time
from finetune.runs.side_files import read_side_file
from finetune.runs.statistics import num_right_of, wilson
from finetune.system.messages import reason

# The states of a run.
RUNNING = "running"
FINISHED = "finished"
UNFINISHED = "unfinished"
EMPTY = "no checkpoint"
DAMAGED = "damaged"
SORT_KEYS = ("when", "data", "network", "epochs", "accuracy", "seconds", "size", "folder")

# libyaml reads a config.yaml in a tenth of the time.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class RunRow:
    """A row of the table of runs, read from the small files of a run.

    Attributes:
        folder: The run's folder.
        state: One of the states above.
        began: When it began, in seconds since 1970.
        data: The data folder as the command named it; "" if unknown.
        network: The backbone; "" if unknown.
        epochs: Number of epochs that have ended; with folds those of the longest fold.
        accuracy: Share of the images that are predicted correctly, or the mean average precision if images have several
            labels; None if nothing was measured.
        interval: The 95 % interval of the accuracy.
        num_images: Number of images on which it was measured.
        split: `test` or `validation`; "" if nothing was measured.
        metric: What `accuracy` is: `accuracy` or `mAP`.
        seconds: Seconds of preparing, training, validating and testing together; None if unknown.
        size: Bytes on disk.
        command: The command that began it; "" if unknown.
        damage: What is wrong with a file of a damaged run; "" for nothing.
    """

    folder: str
    state: str
    began: float
    data: str = ""
    network: str = ""
    epochs: int = 0
    accuracy: float | None = None
    interval: tuple[float, float] | None = None
    num_images: int = 0
    split: str = ""
    metric: str = "accuracy"
    seconds: float | None = None
    size: int = 0
    command: str = ""
    damage: str = ""

    def as_plain(self) -> dict[str, Any]:
        """Return it as plain values for JSON. A mean average precision has the name `mAP`."""
        local = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(self.began))
        plain = asdict(self) | {"began": local}
        if plain.pop("metric") == "accuracy":
            return plain
        return {"mAP" if name == "accuracy" else name: value for name, value in plain.items()}


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
    name = {"when": "began"}.get(key, key)

    def value(row: RunRow) -> float:
        number = getattr(row, name)
        return -math.inf if number is None else number

    return sorted(rows, key=value, reverse=True)


class _SideFiles:
    """The small files of a run, and what is damaged among them."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.damage: list[str] = []
        self.about = self._read("about.json")
        self.seconds = self._read("seconds.json")
        self.result = self._read("test.json", read_result)
        self.kept_weights = self._read("kept_weights.json")
        self.config = self._config(run / "config.yaml")
        self.epochs = self._epochs(run / "metrics.csv")

    def num_epochs(self) -> int:
        """Return how many epochs have ended; with folds those of the longest fold."""
        of_folds = self.run.glob("fit/fold_*/metrics.csv") if num_folds(self.run) else ()
        return max([len(self.epochs), *(len(self._epochs(path)) for path in of_folds)])

    def setting(self, *keys: str) -> Any:
        """Return a value of config.yaml, None if it is not there."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def _read(self, name: str, read: Callable[..., Any] = read_side_file) -> dict[str, Any]:
        try:
            return read(self.run / name)
        except (ValueError, OSError) as error:
            self.damage.append(reason(error))
            return {}

    def _config(self, path: Path) -> dict[str, Any]:
        try:
            content = yaml.load(path.read_text("utf-8"), _Loader)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            self.damage.append(f"{path} is damaged: {reason(error)}")
            return {}
        return content if isinstance(content, dict) else {}

    def _epochs(self, path: Path) -> list[dict[str, str]]:
        """Return the complete rows of metrics.csv."""
        try:
            with open(path, encoding="utf-8", newline="\n") as lines:
                return list(csv.DictReader(line for line in lines if line.endswith("\n")))
        except FileNotFoundError:
            return []
        except (OSError, ValueError, csv.Error) as error:
            self.damage.append(f"{path} is damaged: {reason(error)}")
            return []


def read_row(run: Path) -> RunRow:
    """Return the row of a run. The row of a damaged run has the values that can be read."""
    files = _SideFiles(run)
    measured = _Measured()
    seconds = None
    try:
        measured = _measured(files)
        seconds = sum(files.seconds.values()) if files.seconds else None
        if seconds is not None and seconds < 0:
            raise ValueError("its seconds are below 0")
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
        files.damage.append(f"{run} is damaged: {reason(error)}")
    arguments = files.setting("data", "init_args")
    root = place_of(arguments if isinstance(arguments, dict) else {}) or files.about.get("root")
    return RunRow(
        folder=str(run),
        state=_state(files),
        began=start_time(run),
        data=str(root or ""),
        network=str(files.setting("model", "backbone") or ""),
        epochs=files.num_epochs(),
        accuracy=measured.value if measured.num_images else None,
        interval=measured.interval if measured.num_images else None,
        num_images=measured.num_images,
        split=measured.split,
        metric=measured.metric,
        seconds=seconds,
        size=size_of([run]),
        command=str(files.about.get("command") or ""),
        damage="; ".join(files.damage),
    )


def size_of(paths: Sequence[Path]) -> int:
    """Return how many bytes deleting these files and folders would free.

    A file with several names counts once, and not at all while another name of it is elsewhere.
    """
    counts: dict[tuple[int, int], int] = {}
    files: dict[tuple[int, int], os.stat_result] = {}
    for path in paths:
        for file in _files(path):
            try:
                status = file.lstat()
            except OSError:  # deleted in the meantime
                continue
            key = (status.st_dev, status.st_ino)
            counts[key] = counts.get(key, 0) + 1
            files[key] = status
    return sum(file.st_size for key, file in files.items() if counts[key] >= file.st_nlink)


def _files(path: Path) -> list[Path]:
    if path.is_symlink() or not path.is_dir():
        return [path]
    return [Path(folder, name) for folder, _, names in os.walk(path) for name in names]


def _state(files: _SideFiles) -> str:
    if is_held(files.run):
        return RUNNING
    if files.damage:
        return DAMAGED
    best, last = (files.run / "checkpoints" / f"{name}.ckpt" for name in ("best", "last"))
    if not best.is_file() and not last.is_file():
        return UNFINISHED if num_folds(files.run) else EMPTY
    if "ended" in files.about or files.result:
        return FINISHED
    return UNFINISHED


class _Measured(NamedTuple):
    """The measured accuracy or mean average precision of a run.

    Attributes:
        value: The value of the metric.
        num_images: Number of images; 0 if nothing was measured.
        interval: The 95 % interval of the value.
        split: `test` or `validation`; "" if nothing was measured.
        metric: `accuracy` or `mAP`.
    """

    value: float = 0.0
    num_images: int = 0
    interval: tuple[float, float] = (0.0, 1.0)
    split: str = ""
    metric: str = "accuracy"


def _measured(files: _SideFiles) -> _Measured:
    """Return the measurement of a run: on the test images, or else on the validation images for best.ckpt.

    Raises:
        ValueError: It is not a share of images.
    """
    matrix = files.result.get("confusion_matrix")
    if matrix:
        num_right, num = num_right_of(matrix)
        measured = _Measured(num_right / max(1, num), num, wilson(num_right, num), "test")
    elif files.result.get("label_counts"):
        measured = _tested_labels(files.result)
    else:
        measured = _validated(files)
    low, high = measured.interval
    if measured.num_images and not 0 <= low <= measured.value <= high <= 1:
        raise ValueError(f"its {measured.metric} is {measured.value}")
    return measured


def _tested_labels(result: Mapping[str, Any]) -> _Measured:
    if np.min(result["label_counts"]) < 0:
        raise ValueError("its label_counts are below 0")
    num = sum(map(sum, result["label_counts"][0]))
    if result["test/mAP"] is None:
        return _Measured(metric="mAP")
    return _Measured(result["test/mAP"], num, mean_precision_interval(result), "test", "mAP")


def _validated(files: _SideFiles) -> _Measured:
    """Return the measurement of best.ckpt on the validation images."""
    rows = files.epochs
    has_labels = bool(rows) and MONITORS["several"] in rows[0]
    monitor = MONITORS["several" if has_labels else "single"]
    values = [float(row[monitor]) for row in rows if row.get(monitor)]
    num_images = num_validated(files.about, files.setting)
    if not values or not num_images:
        return _Measured()

    def trials() -> float:
        return label_trials(files.about, num_images) if has_labels else num_images

    value = values[chosen_epoch(values, trials())]
    choice = files.kept_weights
    if choice:  # best.ckpt has interpolated weights instead of those of that epoch
        num_images = choice["num_images"]
        chosen = next(c for c in choice["candidates"] if c["share"] == choice["share"])
        value = next(chosen[name] for name in METRICS if name in chosen)
    if has_labels:
        bounds = approximate_interval(value, trials())
        return _Measured(value, num_images, bounds, "validation", "mAP")
    num_right = round(value * num_images)
    bounds = wilson(num_right, num_images)
    return _Measured(num_right / num_images, num_images, bounds, "validation")


def as_json(rows: Sequence[RunRow]) -> str:
    """Return the rows as JSON."""
    return json.dumps([row.as_plain() for row in rows], indent=2)
