"""Reads the folder of a run: its settings, its metrics, and its predictions for the test images."""

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from finetune.runs.best_epoch import MONITORS, chosen_epoch, describe
from finetune.runs.interpolation_record import FILE, Interpolation
from finetune.runs.metrics_csv import read_metrics
from finetune.runs.outcome import (
    approximate_interval,
    label_trials,
    mean_precision_text,
    num_validated,
)
from finetune.runs.predictions_table import Predictions
from finetune.runs.result_file import read_result
from finetune.runs.side_files import read_side_file
from finetune.runs.statistics import accuracy_line


@dataclass(frozen=True)
class RunRecord:
    """The content of a run's folder. The value of a file that does not exist is empty.

    Attributes:
        path: The folder.
        about: about.json: the command, and facts that were known when the run began.
        config: config.yaml, plain values.
        config_text: The text of config.yaml.
        metrics: Rows of steps.csv.
        seconds: seconds.json.
        result: test.json.
        predictions: test_predictions.csv, or predictions.csv of a cross-validation.
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
    predictions: Predictions | None
    skipped: list[str]
    interpolation: Interpolation | None = None

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
        """When the run began, `2026-01-31 14:05` in local time; for a run of `test`, when it wrote config.yaml."""
        try:
            began = datetime.fromisoformat(self.about["began"]).astimezone()
        except (LookupError, TypeError, ValueError):  # only a fit writes about.json
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
    about = read_side_file(path / "about.json")
    result = read_result(path / "test.json")
    interpolation = read_side_file(path / FILE)
    rows = path / ("predictions.csv" if "folds" in result else "test_predictions.csv")
    names: Sequence[str] = result.get("class_names", ())
    skipped = path / "skipped.txt"
    begun_in = about.get("folder") or result.get("folder", "")
    predictions = None
    if rows.is_file() and names:
        predictions = Predictions.read(rows, names, is_single="label_counts" not in result)
        predictions = _with_existing_paths(predictions, begun_in)
    return RunRecord(
        path=path,
        about=about,
        config=config,
        config_text=config_text,
        metrics=_metrics(path / "steps.csv"),
        seconds=read_side_file(path / "seconds.json"),
        result=result,
        predictions=predictions,
        skipped=skipped.read_text("utf-8", "surrogateescape").splitlines()
        if skipped.is_file()
        else [],
        interpolation=Interpolation.from_plain(interpolation) if interpolation else None,
    )


def _config(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text("utf-8")
        config = yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return text, config if isinstance(config, dict) else {}


def _metrics(path: Path) -> list[dict[str, str]]:
    try:
        rows = read_metrics(path)
        for value in {value for row in rows for value in row.values() if value}:
            float(value)
    except (TypeError, ValueError, csv.Error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return rows


def _with_existing_paths(predictions: Predictions, folder: str) -> Predictions:
    """Return predictions with paths that are valid in the working directory.

    Args:
        predictions: Predictions, whose paths may be relative to `folder`.
        folder: The working directory of the run; "" if it is unknown, then the present one is tried.
    """
    joined = [(path, os.path.join(folder or os.getcwd(), path)) for path in predictions.paths]
    return replace(
        predictions, paths=[full if os.path.isfile(full) else path for path, full in joined]
    )
