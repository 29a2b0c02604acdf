"""TensorBoard, MLflow and wandb: their folder in the run, missing packages, failures, and that nothing is sent."""

import os
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import logged_fits
import pytest
import wandb
from promise import control, promise

from finetune.runs.folder import Run
from finetune.runs.loggers import RunLogger, flatten
from finetune.runs.run_dir import RunDir


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


def test_a_logger_that_fails_says_so_once_and_stops_nothing(run, caplog):
    logger = RunLogger("tensorboard", run)
    logger.start({"a": 1})
    assert RunDir(run.path).facts.loggers == {"tensorboard": "tensorboard"}
    for step in range(3):
        logger.log_metrics({"a": object()}, step)  # which is no number
    logger.close()
    (message,) = caplog.messages
    assert message.startswith("--logger tensorboard: ") and message.endswith("logs nothing more")


# MLflow


def mlflow_run(run: Run) -> Any:
    """Return what MLflow has of a run."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient((run.path / "mlflow").absolute().as_uri())
    return client.get_run(RunDir(run.path).facts.loggers["mlflow"])


@promise("nothing-sent")
@control("nothing-sent")
def test_the_telemetry_of_mlflow_is_off_unless_the_user_says_so(run):
    from mlflow.environment_variables import MLFLOW_DISABLE_TELEMETRY

    del os.environ["MLFLOW_DISABLE_TELEMETRY"]
    assert not MLFLOW_DISABLE_TELEMETRY.get()  # the control: by itself MLflow has it on
    RunLogger("mlflow", run)
    assert MLFLOW_DISABLE_TELEMETRY.get()
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "false"
    RunLogger("mlflow", run)
    assert not MLFLOW_DISABLE_TELEMETRY.get()


def test_mlflow_keeps_metrics_of_classes_called_anything_apart(run):
    """MLflow refuses most characters and long names, and Lightning drops the former: two names could become one."""
    logger = RunLogger("mlflow", run)
    names = ["a, b", "a; b", "ä", 255 * "x"]
    given = {f"val/recall/{name}": float(i) for i, name in enumerate(names, start=1)}
    with logged_fits.connections() as tried:
        logger.start({})
        logger.log_metrics(given, 1)
        logger.log_metrics({name: -value for name, value in given.items()}, 2)
    assert not tried
    found = mlflow_run(run).data.metrics
    assert set(found.values()) == {-1.0, -2.0, -3.0, -4.0} and len(found) == 4
    assert {"val/recall/a_2c_ b", "val/recall/a_3b_ b", "val/recall/_e4_"} < set(found)


def test_an_mlflow_server_that_is_not_there_is_reported_soon(run):
    os.environ["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:9"
    began = time.monotonic()
    with pytest.raises(ValueError, match="^--logger mlflow: .*127.0.0.1:9 .*MLFLOW_TRACKING_URI"):
        RunLogger("mlflow", run).start({})
    assert time.monotonic() - began < 20  # it would ask for minutes


# wandb


class Sent:
    """A run of wandb that is sent."""

    id, url = "abc", "https://example.org/abc"

    config = mock.MagicMock()

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
    ("variable", "mode"), [(None, "offline"), ("online", "online"), ("disabled", "disabled")]
)
def test_wandb_sends_nothing_unless_the_user_says_so(
    run, begun, monkeypatch, caplog, variable, mode
):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_ERROR_REPORTING", raising=False)
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    with caplog.at_level("INFO", "finetune"):
        RunLogger("wandb", run).start({})
    assert RunDir(run.path).facts.loggers == {"wandb": "abc"}
    assert begun["mode"] == mode and begun["dir"] == str(run.path)
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"
    # where it is sent is reported
    assert caplog.messages == ([] if mode == "offline" else [f"logging to {Sent.url}"])


def test_errors_of_wandb_are_one_line(run, monkeypatch):
    (run.path / "wandb").touch()  # wandb would take a temporary folder
    with pytest.raises(ValueError, match=f"^--logger wandb: .*{run.path}/wandb"):
        RunLogger("wandb", run).start({})
    (run.path / "wandb").unlink()

    def fail(**given: Any) -> None:
        raise wandb.errors.UsageError("No API key\nconfigured.")

    monkeypatch.setattr(wandb, "init", fail)
    with pytest.raises(ValueError, match="^--logger wandb: No API key configured.$"):
        RunLogger("wandb", run).start({})
