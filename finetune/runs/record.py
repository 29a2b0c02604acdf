"""Reads the folder of a run: its settings, its metrics, and its predictions for the test images."""

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from finetune.runs.best_epoch import MONITORS
from finetune.runs.headline import NO_RESULT, Best, Headline
from finetune.runs.metrics_csv import read_metrics
from finetune.runs.predictions_table import Predictions
from finetune.runs.result_file import read_result
from finetune.runs.run_dir import RunDir, best_in, result_in


@dataclass(frozen=True)
class RunRecord:
    """The content of a run's folder. The value of a file that does not exist is empty.

    Attributes:
        path: The folder.
        about: run.json: the command, facts that were known when the run began, and its results.
        config: config.yaml, plain values.
        config_text: The text of config.yaml.
        metrics: Rows of steps.csv.
        result: test.json.
        predictions: test_predictions.csv, or predictions.csv of a cross-validation.
        skipped: Lines of skipped.txt.
    """

    path: Path
    about: dict[str, Any]
    config: dict[str, Any]
    config_text: str
    metrics: list[dict[str, str]]
    result: dict[str, Any]
    predictions: Predictions | None
    skipped: list[str]

    @property
    def has_labels(self) -> bool:
        """Whether images have several labels or none, instead of one class each."""
        return "label_counts" in self.result or bool(self.names(MONITORS["several"]))

    @property
    def name(self) -> str:
        """The folder's name. The name of a version has its parent folders as well: `demo/fit/version_0`."""
        return RunDir(self.path).name

    @property
    def title(self) -> str:
        """Data set and network, `flowers, resnet18`; the name of the run if neither is known."""
        return ", ".join(filter(None, (self.data_set, self.network))) or self.name

    @property
    def data_set(self) -> str:
        """The name of the folder of the data set; "" if it is not known."""
        root = self.about.get("root") or self.setting("data", "init_args", "root")
        folder = str(self.about.get("folder", ""))
        return Path(folder, root).name if isinstance(root, str) else ""

    @property
    def network(self) -> str:
        """The name of the backbone, with the number of members if it is an ensemble."""
        backbone = str(self.setting("model", "backbone") or "")
        members = self.setting("members") or 1
        return f"{members} × {backbone}" if members > 1 else backbone

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

    @cached_property
    def best(self) -> Best | None:
        """The weights of best.ckpt; None without a validation."""
        return best_in(self.about)

    @cached_property
    def headline(self) -> Headline | None:
        """The result of the test, or else of the validation; None if neither is known."""
        return result_in(self.about)

    @property
    def tested(self) -> Headline | None:
        """The result of the test; None if nothing was tested."""
        result = self.headline
        return result if result is not None and result.split == "test" else None

    @property
    def headline_text(self) -> str:
        """The result in one sentence."""
        return str(self.headline or NO_RESULT)

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each phase; empty if they are not known."""
        return self.about.get("seconds", {})

    def num_images(self, split: str) -> int:
        """Return the number of images of a split; 0 if it is unknown."""
        facts = self.about.get("splits", {}).get(split, {})
        return int(facts.get("num_images", sum(facts.get("counts", {}).values())))

    @property
    def date(self) -> str:
        """When the run began, `2026-01-31 14:05` in local time; "" if that is unknown."""
        try:
            began = datetime.fromisoformat(self.about["began"]).astimezone()
        except (LookupError, ValueError):
            return ""
        return began.strftime("%Y-%m-%d %H:%M")


def read_run(path: Path) -> RunRecord:
    """Read the folder of a run of `fit` or `test`.

    Raises:
        FileNotFoundError: It is not the folder of a run.
        ValueError: A file in it is damaged.
    """
    run = RunDir(path)
    if not run.is_run:
        fault = "it has no run.json" if path.exists() else "it does not exist"
        raise FileNotFoundError(
            f"{str(path)!r} is not the folder of a run: {fault}. `finetune runs` lists the runs"
        )
    about = run.facts()
    config_text, config = _config(path / "config.yaml")
    result = read_result(path / "test.json")
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
        result=result,
        predictions=predictions,
        skipped=skipped.read_text("utf-8", "surrogateescape").splitlines()
        if skipped.is_file()
        else [],
    )


def _config(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text("utf-8")
        config = yaml.safe_load(text)
    except FileNotFoundError:  # killed before it was written
        return "", {}
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
