"""TensorBoard, MLflow and wandb: their folder in the run, missing packages, failures, and that nothing is sent."""

import os
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import logged_fits
import pytest
import wandb
from promise import control, promise

from finetune.runs.folder import Run
from finetune.runs.mlflow_logger import MLFlowLogger
from finetune.runs.run_logger import RunLogger, flatten
from finetune.runs.tensorboard_logger import TensorBoardLogger
from finetune.runs.wandb_logger import WandbLogger


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "some", "fit")
    run.choose()
    return run


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Put environment variables back, which libraries read and set."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_settings_are_logged_by_dotted_names():
    nested = {"a": {"b": {"c": 1}, "d": None}, "e": [1, {"f": 2}], "g": {}, "h": "text", "i": False}
    nested["j"] = date(2026, 1, 2)  # which YAML makes of a name such as 2026-01-02
    assert flatten(nested) == {
        "a.b.c": 1,
        "a.d": "null",
        "e": '[1, {"f": 2}]',
        "h": "text",
        "i": False,
        "j": '"2026-01-02"',
    }


class Full(RunLogger):
    """Of a library that raises what it likes."""

    name = version = None
    num_written = 0

    def log_config(self, settings: Any) -> None:
        raise KeyError("no\nroom")

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.num_written += 1
        raise RuntimeError("the disk\nis full")


def test_a_logger_that_fails_says_so_once_and_stops_nothing(caplog):
    logger = Full()
    for step in range(3):
        logger.log_metrics({"a": 1.0}, step)
    logger.close()
    assert caplog.messages == ["Full: the disk is full: it logs nothing more"]
    assert logger.has_failed and logger.num_written == 1
    with pytest.raises(ValueError, match="Full: .*room"):  # before training
        Full().log_config({})


def test_tensorboard_in_a_folder_of_ones_own_has_one_for_each_run(tmp_path):
    def folder_of(run: Run, **given: str) -> str:
        logger = TensorBoardLogger(str(tmp_path / "board"), **given)
        logger.attach(run, "TensorBoardLogger")
        logger.log_metrics({"a": 1.0}, 0)
        logger.finalize("success")
        return str(Path(logger.log_dir).relative_to(tmp_path / "board"))

    first, second = Run(tmp_path, "fit"), Run(tmp_path, "fit")
    folders = [folder_of(run) for run in (first, second, first)]
    assert folders == [f"finetune/version_{i}" for i in (0, 1, 0)]
    assert folder_of(Run(tmp_path, "fit"), name="x", version="y") == "x/y"


# MLflow


@promise("nothing-sent")
@control("nothing-sent")
def test_the_telemetry_of_mlflow_is_off_unless_the_user_says_so():
    from mlflow.environment_variables import MLFLOW_DISABLE_TELEMETRY

    del os.environ["MLFLOW_DISABLE_TELEMETRY"]
    assert not MLFLOW_DISABLE_TELEMETRY.get()  # the control: by itself MLflow has it on
    MLFlowLogger()
    assert MLFLOW_DISABLE_TELEMETRY.get()
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "false"
    MLFlowLogger()
    assert not MLFLOW_DISABLE_TELEMETRY.get()


def test_mlflow_keeps_metrics_of_classes_called_anything_apart(run):
    """MLflow refuses most characters and long names, and Lightning drops the former: two names could become one."""
    logger = MLFlowLogger()
    logger.attach(run, "MLFlowLogger")
    names = ["a, b", "a; b", "ä", 255 * "x"]
    given = {f"val/recall/{name}": float(i) for i, name in enumerate(names, start=1)}
    with logged_fits.connections() as tried:
        logger.log_metrics(given, 1)
        logger.log_metrics({name: -value for name, value in given.items()}, 2)
    assert not tried
    found = logger.experiment.get_run(logger.run_id).data.metrics
    assert set(found.values()) == {-1.0, -2.0, -3.0, -4.0} and len(found) == 4
    assert {"val/recall/a_ b", "val/recall/a_ b 2", "val/recall/_"} < set(found)


def test_mlflow_in_a_folder_and_under_a_name_of_ones_own(run, tmp_path):
    logger = MLFlowLogger(save_dir=str(tmp_path / "board"), run_name="mine", experiment_name="some")
    logger.attach(run, "MLFlowLogger")
    assert not (tmp_path / "board").exists()  # before anything is logged
    assert logger.experiment.get_run(logger.run_id).info.run_name == "mine"
    assert (tmp_path / "board").is_dir() and not (run.path / "mlflow").exists()


def test_an_mlflow_server_that_is_not_there_is_reported_soon(run):
    os.environ["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:9"
    logger = MLFlowLogger()
    logger.attach(run, "MLFlowLogger")
    began = time.monotonic()
    with pytest.raises(ValueError, match="^MLFlowLogger: .*127.0.0.1:9 .*MLFLOW_TRACKING_URI"):
        _ = logger.experiment
    assert time.monotonic() - began < 20  # it would ask for minutes


# wandb


class Sent:
    """A run of wandb that is sent."""

    id, url = "abc", "https://example.org/abc"

    def define_metric(self, *args: Any, **given: Any) -> None: ...


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What wandb was begun with."""
    given: dict[str, Any] = {}

    def init(**more: Any) -> Sent:
        given.update(more)
        return Sent()

    monkeypatch.setattr(wandb, "init", init)
    return given


@promise("nothing-sent")
@pytest.mark.parametrize(
    ("offline", "variable", "mode"),
    [
        (None, None, "offline"),
        (None, "online", "online"),
        (None, "disabled", "disabled"),
        (False, None, "online"),
        (True, "online", "offline"),
    ],
)
def test_wandb_sends_nothing_unless_the_user_says_so(
    run, begun, monkeypatch, caplog, offline, variable, mode
):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_ERROR_REPORTING", raising=False)
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    logger = WandbLogger(offline=offline)
    logger.attach(run, "WandbLogger")
    with caplog.at_level("INFO", "finetune"):
        assert logger.experiment.id == "abc"
    assert begun["mode"] == mode and begun["dir"] == str(run.path)
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"
    # where it is sent is reported
    assert caplog.messages == ([] if mode == "offline" else [f"logging to {Sent.url}"])


def test_errors_of_wandb_are_one_line(run, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    logger = WandbLogger(save_dir=str(tmp_path / "file"))  # wandb would take a temporary folder
    logger.attach(run, "WandbLogger")
    with pytest.raises(ValueError, match=f"^WandbLogger: .*{tmp_path}/file/wandb"):
        _ = logger.experiment

    def fail(**given: Any) -> None:
        raise wandb.errors.UsageError("No API key\nconfigured.")

    monkeypatch.setattr(wandb, "init", fail)
    logger = WandbLogger(offline=False)
    logger.attach(run, "WandbLogger")
    with pytest.raises(ValueError, match="^WandbLogger: No API key configured.$"):
        _ = logger.experiment
