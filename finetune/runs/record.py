"""Reads all files of a run that pages show: its settings, its metrics, and its predictions for the test images."""

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from finetune.data.addresses import is_address
from finetune.data.splits import data_set_name
from finetune.runs.best_epoch import MONITORS
from finetune.runs.headline import NO_RESULT
from finetune.runs.metrics_csv import read_metrics
from finetune.runs.predictions_table import Predictions
from finetune.runs.result_file import read_result
from finetune.runs.run_dir import RunDir, reading


@dataclass(frozen=True)
class RunRecord(RunDir):
    """A run with the content of its files, each read when it is first needed. A file that does not exist is empty.

    A damaged file raises a ValueError that names it.
    """

    @cached_property
    def config_text(self) -> str:
        """The text of config.yaml; "" if the run was killed before it was written."""
        path = self.path / "config.yaml"
        with reading(path):
            return path.read_text("utf-8") if path.exists() else ""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.yaml."""
        with reading(self.path / "config.yaml", yaml.YAMLError):
            config = yaml.safe_load(self.config_text)
        return config if isinstance(config, dict) else {}

    @cached_property
    def metrics(self) -> list[dict[str, str]]:
        """The rows of steps.csv."""
        path = self.path / "steps.csv"
        with reading(path, csv.Error):
            rows = read_metrics(path)
            for value in {value for row in rows for value in row.values() if value}:
                float(value)
        return rows

    @cached_property
    def result(self) -> dict[str, Any]:
        """The content of test.json."""
        return read_result(self.path / "test.json")

    @cached_property
    def predictions(self) -> Predictions | None:
        """The predictions for the test images; None if there are none. Paths are valid in the working directory."""
        predictions = self._predictions("predictions.csv", "path")
        if predictions is None:
            return None
        paths = ((path, os.path.join(self.begun_in, path)) for path in predictions.paths)
        return replace(
            predictions, paths=[at if os.path.isfile(at) else path for path, at in paths]
        )

    @cached_property
    def group_predictions(self) -> Predictions | None:
        """The predictions for the groups of test images, whose names are the paths; None if there are none."""
        return self._predictions("group_predictions.csv", "group")

    def _predictions(self, file: str, key: str) -> Predictions | None:
        path = self.path / (file if "folds" in self.result else f"test_{file}")
        names: Sequence[str] = self.result.get("class_names", ())
        if not names or not path.is_file():
            return None
        return Predictions.read(path, names, "label_counts" not in self.result, key)

    @property
    def num_skipped(self) -> int:
        """The number of lines of skipped.txt."""
        path = self.path / "skipped.txt"
        return len(path.read_bytes().splitlines()) if path.is_file() else 0

    @property
    def begun_in(self) -> str:
        """The working directory of the run, to which its paths may be relative."""
        return self.facts.folder or str(self.result.get("folder") or os.getcwd())

    def absolute(self, path: str) -> str:
        """Return the absolute path of a path that may be relative to the run's working directory; or an address."""
        return path if is_address(path) else os.path.abspath(os.path.join(self.begun_in, path))

    @property
    def data_folder(self) -> str:
        """The absolute path or the address of the folder of the images."""
        root = self.setting("data", "init_args", "root")
        table = self.setting("data", "init_args", "table")
        if isinstance(root, str):
            return self.absolute(root.rstrip("/"))
        is_table = isinstance(table, str)
        return self.absolute(os.path.dirname(table) if is_table else self.facts.root or "")

    @property
    def tested_names(self) -> list[str]:
        """The paths of the test images below the data folder; that of an image elsewhere is absolute.

        A data folder that was moved or copied has images of the same names.
        """
        # of an archive or a dataset of the hub, in the cache
        folder = self.result.get("image_folder")
        prefix = os.path.join(self.absolute(folder) if folder else self.data_folder, "")
        paths = self.predictions.paths if self.predictions else []
        return [self.absolute(path).removeprefix(prefix) for path in paths]

    @property
    def has_labels(self) -> bool:
        """Whether images have several labels or none, instead of one class each."""
        return "label_counts" in self.result or bool(self.names(MONITORS["several"]))

    @property
    def title(self) -> str:
        """Data set and network, `flowers, resnet18`; the name of the run if neither is known."""
        return ", ".join(filter(None, (self.data_set, self.network))) or self.name

    @property
    def data_set(self) -> str:
        """The name of the data set by its folder; "" if it is not known."""
        root = self.facts.root or self.setting("data", "init_args", "root")
        return data_set_name(os.path.join(self.facts.folder, root)) if isinstance(root, str) else ""

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
        first = 1 if over == "epoch" else 0
        rows = [row for row in self.metrics if row.get(name) and row.get(over)]
        return [float(row[over]) + first for row in rows], [float(row[name]) for row in rows]

    def names(self, prefix: str) -> list[str]:
        """Return the names of the metrics that begin with `prefix`."""
        columns = self.metrics[0] if self.metrics else ()
        return [name for name in columns if name.startswith(prefix)]

    @property
    def headline_text(self) -> str:
        """The result in one sentence."""
        return str(self.facts.result or NO_RESULT)

    @property
    def date(self) -> str:
        """When the run began, `2026-01-31 14:05` in local time; "" if that is unknown."""
        began = self.facts.began
        return "" if began is None else began.astimezone().strftime("%Y-%m-%d %H:%M")


def read_run(path: Path) -> RunRecord:
    """Return the record of a run of `fit` or `test`.

    Raises:
        FileNotFoundError: It is not the folder of a run.
        ValueError: Its run.json is damaged.
    """
    run = RunRecord(path)
    if not run.is_run:
        fault = "it has no run.json" if path.exists() else "it does not exist"
        raise FileNotFoundError(
            f"{str(path)!r} is not the folder of a run: {fault}. `finetune runs` lists the runs"
        )
    if run.damage:
        raise ValueError(run.damage)
    return run
