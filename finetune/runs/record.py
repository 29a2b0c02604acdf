"""Reads the folder of a run: its settings, its metrics, and its predictions for the test images."""

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import numpy as np
import yaml

from finetune.models.checkpoint_values import is_interpolation
from finetune.runs.answers import Answers, LabelAnswers, read_answers, read_label_answers
from finetune.runs.best_epoch import MONITORS, chosen_epoch, describe
from finetune.runs.interpolation_record import FILE, Interpolation
from finetune.runs.metrics_csv import read_metrics
from finetune.runs.outcome import (
    INTERVAL,
    approximate_interval,
    label_trials,
    mean_precision_text,
    num_validated,
)
from finetune.runs.side_files import are_seconds, is_about, read_side_file
from finetune.runs.statistics import accuracy_line
from finetune.system.messages import shown

_Answers = TypeVar("_Answers", Answers, LabelAnswers)


@dataclass(frozen=True)
class RunRecord:
    """The content of a run's folder. The value of a file that does not exist is empty.

    Attributes:
        path: The folder.
        about: about.json: the command, and facts that were known when the run began.
        config: config.yaml, plain values.
        config_text: The text of config.yaml.
        metrics: Rows of steps.csv. Earlier versions wrote them to metrics.csv.
        seconds: seconds.json.
        result: test.json.
        answers: test_predictions.csv, or predictions.csv of a cross-validation; None if images have several labels.
        label_answers: test_predictions.csv if images have several labels.
        skipped: Lines of skipped.txt.
        interpolation: kept_weights.json; None if the run did not interpolate its weights.
    """

    path: Path
    about: dict[str, Any]
    config: dict[str, Any]
    config_text: str
    metrics: list[dict[str, str]]
    seconds: dict[str, float]
    result: dict[str, Any]
    answers: Answers | None
    skipped: list[str]
    interpolation: Interpolation | None = None
    label_answers: LabelAnswers | None = None

    @property
    def has_labels(self) -> bool:
        """Whether images have several labels or none, instead of one class each."""
        return "label_counts" in self.result or bool(self.names(MONITORS["several"]))

    @property
    def monitor(self) -> str:
        """The metric by which the best epoch was chosen."""
        return MONITORS["several" if self.has_labels else "single"]

    @property
    def name(self) -> str:
        """The folder's name. The name of a version has its parent folders as well: `demo/fit/version_0`."""
        parts = self.path.resolve().parts
        return "/".join(parts[-3:] if parts[-1].startswith("version_") else parts[-1:])

    def setting(self, *keys: str) -> Any:
        """Return a value of the config; None if the config does not have it."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def line(self, name: str, over: str = "epoch") -> tuple[list[float], list[float]]:
        """Return the steps or the epochs of a metric, epochs counted from one, and its values."""
        rows = [row for row in self.metrics if row.get(name) and row.get(over)]
        places = (
            [float(row[over]) + 1 for row in rows]
            if over == "epoch"
            else [float(row[over]) for row in rows]
        )
        return places, [float(row[name]) for row in rows]

    def names(self, prefix: str) -> list[str]:
        """Return the names of the metrics that begin with `prefix`."""
        return [
            name for name in (self.metrics[0] if self.metrics else ()) if name.startswith(prefix)
        ]

    @property
    def num_validated(self) -> int:
        """Number of images of each validation."""
        return num_validated(self.about, self.setting)

    @property
    def num_trials(self) -> float:
        """Number of validation images; for a mean average precision the effective number."""
        num = self.num_validated
        return label_trials(self.about, num) if self.has_labels else num

    @property
    def best(self) -> tuple[int, float] | None:
        """The epoch of best.ckpt, counted from one, and its value of `monitor`; None without a validation."""
        epochs, accuracies = self.line(self.monitor)
        if not epochs:
            return None
        best = chosen_epoch(accuracies, self.num_trials)
        return int(epochs[best]), accuracies[best]

    @property
    def validated(self) -> tuple[float, int] | None:
        """Value of `monitor` for best.ckpt and number of validation images, 0 if unknown; None without a validation."""
        if self.best is None:
            return None
        chosen = self.interpolation
        if chosen is None:
            return self.best[1], self.num_validated
        return chosen.chosen_score, chosen.num_images

    @property
    def date(self) -> str:
        """When the run began, `2026-01-31 14:05` in local time; for an older run, when its config.yaml was written."""
        try:
            began = datetime.fromisoformat(self.about["began"]).astimezone()
        except (LookupError, TypeError, ValueError):  # an older run, or a damaged about.json
            began = datetime.fromtimestamp((self.path / "config.yaml").stat().st_mtime)
        return began.strftime("%Y-%m-%d %H:%M")

    @property
    def weights_of_best(self) -> str:
        """Which weights best.ckpt has, in few words, such as `epoch 3`; "" without a validation."""
        if self.best is None:
            return ""
        epoch = self.best[0]
        return self.interpolation.weights(epoch) if self.interpolation else f"epoch {epoch}"

    @property
    def why_best(self) -> str:
        """Which weights best.ckpt has, and why; "" without a validation."""
        if self.best and self.interpolation:
            return self.interpolation.message(self.best[0])
        if self.best is None:
            return ""
        return describe(*self.best, max(self.line(self.monitor)[1]), self.monitor)


def validation_outcome(run: RunRecord) -> str:
    """Return the accuracy of best.ckpt on the validation images with its interval; "" if nothing was validated."""
    if run.validated is None or not run.num_validated:
        return ""
    value, num = run.validated
    line = accuracy_line(round(value * num), num, "validation")
    if run.has_labels:
        text = mean_precision_text(value, approximate_interval(value, run.num_trials))
        line = f"validation mAP {text}, on {num:,} images"
    return f"{line}. These images chose the epoch; there was no test"


def read_run(path: Path) -> RunRecord:
    """Read the folder of a run of `fit` or `test`.

    Raises:
        FileNotFoundError: It is not the folder of a run.
        ValueError: A file in it is damaged.
    """
    if not (path / "config.yaml").is_file():
        fault = "it has no config.yaml" if path.exists() else "it does not exist"
        raise FileNotFoundError(
            f"{str(path)!r} is not the folder of a run: {fault}. `finetune runs` lists the runs"
        )
    config_text, config = _config(path / "config.yaml")
    about = read_side_file(path / "about.json", is_about)
    result = _result(path / "test.json")
    interpolation = read_side_file(path / FILE, is_interpolation)
    rows = path / ("predictions.csv" if "folds" in result else "test_predictions.csv")
    steps = path / "steps.csv"
    names: Sequence[str] = result.get("class_names", ())
    skipped = path / "skipped.txt"
    begun_in = about.get("folder") or result.get("folder", "")
    answers = label_answers = None
    if rows.is_file() and names and "label_counts" in result:
        label_answers = _with_existing_paths(read_label_answers(rows, names), begun_in)
    elif rows.is_file() and names:
        answers = _with_existing_paths(read_answers(rows, names), begun_in)
    return RunRecord(
        path=path,
        about=about,
        config=config,
        config_text=config_text,
        metrics=_metrics(steps if steps.is_file() else path / "metrics.csv"),
        seconds=read_side_file(path / "seconds.json", are_seconds),
        result=result,
        answers=answers,
        skipped=skipped.read_text("utf-8", "surrogateescape").splitlines()
        if skipped.is_file()
        else [],
        interpolation=Interpolation.from_plain(interpolation) if interpolation else None,
        label_answers=label_answers,
    )


def _config(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text("utf-8")
        config = yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return text, config if isinstance(config, dict) else {}


def _result(path: Path) -> dict[str, Any]:
    result = read_side_file(path)
    names = result.get("class_names", [])
    matrix = result.get("confusion_matrix") or []
    rows = [names, *([matrix, *matrix] if isinstance(matrix, list) and matrix else [])]
    if any(not isinstance(row, list) or len(row) != len(rows[0]) for row in rows):
        raise ValueError(
            f"{path} is damaged: its confusion_matrix does not go with its class_names"
        )
    _check_values(path, result, matrix)
    if "label_counts" in result and not _are_label_counts(result, len(names)):
        raise ValueError(f"{path} is damaged: its counts do not go with its class_names")
    if not _is_interval(result.get(INTERVAL, [0.0, 1.0])):
        raise ValueError(f"{path} is damaged: {INTERVAL} is not an interval")
    if not _are_label_errors(result.get("label_calibration", {}), len(names)):
        raise ValueError(
            f"{path} is damaged: its label_calibration does not go with its class_names"
        )
    if not _are_folds(result.get("folds", [])):
        raise ValueError(f"{path} is damaged: its folds are not results of folds")
    for name in ("calibration", "joined_calibration"):
        if not _has_thresholds(result.get(name), len(names)):
            raise ValueError(f"{path} is damaged: its {name} does not go with its class_names")
    if not isinstance(result.get("test_folder", {}), dict):
        raise ValueError(f"{path} is damaged: its test_folder is not a result")
    return result


def _check_values(path: Path, result: dict[str, Any], matrix: list[list[Any]]) -> None:
    """Check the types of the metrics, the paths and the confusion matrix in test.json.

    Raises:
        ValueError: One is not what a run writes.
    """
    if not _are_counts(matrix):
        raise ValueError(f"{path} is damaged: its confusion_matrix has other values than counts")
    if wrong := [name for name, value in result.items() if not _is_metric(name, value)]:
        raise ValueError(f"{path} is damaged: its {shown(wrong[0])} is not a number")
    for name in ("checkpoint", "folder"):
        if type(result.get(name) or "") is not str:
            raise ValueError(f"{path} is damaged: its {name} is not a path")


def _are_counts(matrix: list[list[Any]]) -> bool:
    """Return whether the cells of a confusion matrix are numbers of images."""
    return all(type(cell) is int and cell >= 0 for row in matrix for cell in row)


def _is_metric(name: str, value: Any) -> bool:
    """Return whether a value of test.json is a number or none, if its name is that of a metric."""
    return not name.startswith("test/") or type(value) in (int, float, NoneType)


# The types of the values of a fold in test.json.
_FOLD = {
    "fold": (int,),
    "run": (str,),
    "num_images": (int,),
    "num_right": (int,),
    "loss": (float, int, NoneType),
    "best_epoch": (int, NoneType),
}


def _are_folds(rows: Any) -> bool:
    """Return whether the results of folds in test.json have the form that `fold_results` writes."""
    return isinstance(rows, list) and all(map(_is_fold, rows))


def _is_fold(row: Any) -> bool:
    if not isinstance(row, dict):
        return False
    if not all(type(row.get(name)) in types for name, types in _FOLD.items()):
        return False
    mean = row.get("mAP")
    bounds = row.get(INTERVAL)
    return mean is None if bounds is None else type(mean) is float and _is_interval(bounds)


def _has_thresholds(calibration: Any, num_labels: int) -> bool:
    """Return whether a calibration in test.json is none, or has a threshold for each label if it has any."""
    if calibration is None:
        return True
    if not isinstance(calibration, dict):
        return False
    thresholds = calibration.get("thresholds")
    if thresholds is None:
        return True
    kinds = [float] * num_labels
    return isinstance(thresholds, list) and [*map(type, thresholds)] == kinds


def _are_label_counts(result: dict[str, Any], num_labels: int) -> bool:
    """Return whether the counts of several labels in test.json have the shapes that `results` writes."""
    shapes: dict[str, tuple[int, ...]] = {
        "label_counts": (num_labels, 2, 2),
        "cooccurrence": (num_labels, num_labels),
        "predicted_for": (num_labels, num_labels),
    }
    try:
        return all(
            np.array(result[name], np.int64).shape == shape for name, shape in shapes.items()
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return False


def _is_interval(bounds: Any) -> bool:
    """Return whether a value of test.json is the lower and the upper end of an interval in [0, 1]."""
    is_pair = isinstance(bounds, list) and [type(end) for end in bounds] == [float, float]
    return is_pair and 0 <= bounds[0] <= bounds[1] <= 1


def _are_label_errors(errors: Any, num_labels: int) -> bool:
    """Return whether the calibration errors of labels in test.json are numbers, one for each label."""
    if not isinstance(errors, dict):
        return False
    kinds = [float] * num_labels
    return all(isinstance(v, list) and [*map(type, v)] == kinds for v in errors.values())


def _metrics(path: Path) -> list[dict[str, str]]:
    try:
        rows = read_metrics(path)
        for value in {value for row in rows for value in row.values() if value}:
            float(value)
    except (TypeError, ValueError, csv.Error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return rows


def _with_existing_paths(answers: _Answers, folder: str) -> _Answers:
    """Return predictions with paths that are valid in the working directory.

    Args:
        answers: Predictions, whose paths may be relative to `folder`.
        folder: The working directory of the run; "" if it is unknown, then the present one is tried.
    """
    joined = [(path, os.path.join(folder or os.getcwd(), path)) for path in answers.paths]
    return replace(answers, paths=[full if os.path.isfile(full) else path for path, full in joined])
