"""Fits with additional loggers: the content of steps.csv, config.yaml, TensorBoard and MLflow."""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from colours import QUICKEST
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from finetune.cli import run
from finetune.runs.loggers import flatten
from finetune.runs.metrics_csv import read_metrics

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # before it is imported

RUN = Path("runs/fit/version_0")


@contextmanager
def connections() -> Iterator[list[Any]]:
    """Block the network for this process, and return the addresses that it tried."""
    tried: list[Any] = []

    def refuse(*address: Any, **options: Any) -> None:
        tried.append(address)
        raise OSError("there is no network in tests")

    def connect(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:  # by which wandb speaks with its own process
            refuse(address)
        own(self, address)

    own = socket.socket.connect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect)
        patch.setattr(socket, "getaddrinfo", refuse)
        yield tried


def fit_with(colours: Path, capfd: pytest.CaptureFixture[str], *options: str) -> list[str]:
    """Fit, with a row for each step, and return what was printed, with no numbers in it."""
    capfd.readouterr()
    with connections() as tried:
        run(
            [
                "fit",
                "--data.root",
                str(colours),
                *QUICKEST,
                "--trainer.log_every_n_steps",
                "1",
                *options,
            ]
        )
    assert not tried
    return [
        re.sub(r"[\d.]+", "#", line)
        for stream in capfd.readouterr()
        for line in stream.splitlines()
    ]


def steps(folder: Path = RUN) -> dict[tuple[str, int], float]:
    """Return the content of steps.csv, by name and step."""
    rows = read_metrics(folder / "steps.csv")
    return {
        (name, int(row["step"])): float(v)
        for row in rows
        for name, v in row.items()
        if v and name != "step"
    }


def settings(folder: Path = RUN) -> dict[str, Any]:
    """Return the settings in config.yaml, flat."""
    return flatten(yaml.safe_load((folder / "config.yaml").read_text("utf-8")))


def events(folder: Path = RUN / "tensorboard") -> EventAccumulator:
    """Return what TensorBoard reads."""
    return EventAccumulator(str(folder), {"scalars": 0, "images": 0}).Reload()


def scalars() -> dict[tuple[str, int], float]:
    """Return what TensorBoard has, as `steps` does."""
    found = events()
    return {
        (tag, event.step): event.value
        for tag in found.Tags()["scalars"]
        for event in found.Scalars(tag)
    }


def hyperparameters(folder: Path = RUN / "tensorboard") -> list[dict[str, object]]:
    """Return the settings that each session begins with, as TensorBoard's page of hyperparameters finds them."""
    found = []
    for file in sorted(folder.glob("events*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.tag == "_hparams_/session_start_info":
                    content = HParamsPluginData.FromString(value.metadata.plugin_data.content)
                    start = content.session_start_info.hparams
                    found.append(
                        {key: getattr(v, v.WhichOneof("kind")) for key, v in start.items()}
                    )
    return found


def mlflow_run() -> tuple[Any, Any]:
    """Return the only run in MLflow."""
    # imported only by the tests that need it, since it takes a second
    from mlflow.tracking import MlflowClient

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        client = MlflowClient((RUN / "mlflow").absolute().as_uri())
        (found,) = client.search_runs([client.get_experiment_by_name("finetune").experiment_id])
    return client, found


def mlflow_metrics() -> dict[tuple[str, int], float]:
    """Return what MLflow has, as `steps` does."""
    client, found = mlflow_run()
    names = found.data.metrics
    return {
        (name, m.step): m.value
        for name in names
        for m in client.get_metric_history(found.info.run_id, name)
    }
