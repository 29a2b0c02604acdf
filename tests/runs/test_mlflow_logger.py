"""MLflow's files in the run's folder: the values of steps.csv, and the config once."""

import os
import shutil
import time
from pathlib import Path

import pytest
from logged_fits import RUN, connections, fit_with, mlflow_metrics, mlflow_run, settings, steps
from promise import control, promise

from finetune.runs.mlflow_logger import MLFlowLogger

LOGGER = ("--logger", "mlflow")


@pytest.mark.slow
def test_a_fit_logs_what_steps_csv_has_and_continues_there(colours, cli, capfd):
    lines = fit_with(colours, capfd, *LOGGER)
    _, found = mlflow_run()
    assert mlflow_metrics() == steps() and found.info.status == "FINISHED"
    assert found.info.run_name == "runs-fit-version_0"
    params = {name: str(value)[:250] for name, value in settings().items()}
    assert found.data.params == params
    before = steps()
    fit_with(colours, capfd, *LOGGER, "--resume", "--trainer.max_epochs", "2")
    assert mlflow_metrics() == before | steps() and max(step for _, step in steps()) == 8
    _, found = mlflow_run()
    assert found.info.status == "FINISHED" and found.data.params == params
    assert lines == fit_with(colours, capfd)
    assert not (RUN.parent / "version_1/mlflow").exists() and not Path("mlruns").exists()


@promise("nothing-sent")
@control("nothing-sent")
def test_telemetry_is_off_unless_the_user_says_so(environment):
    from mlflow.environment_variables import MLFLOW_DISABLE_TELEMETRY

    del os.environ["MLFLOW_DISABLE_TELEMETRY"]
    assert not MLFLOW_DISABLE_TELEMETRY.get()  # the control: by itself MLflow has it on
    MLFlowLogger()
    assert MLFLOW_DISABLE_TELEMETRY.get()
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "false"
    MLFlowLogger()
    assert not MLFLOW_DISABLE_TELEMETRY.get()


def test_classes_may_be_called_anything(run, environment):
    """MLflow refuses most characters and long names, and Lightning drops the former: two names could become one."""
    logger = MLFlowLogger()
    logger.attach(run, "MLFlowLogger")
    given = {
        "val/recall/a, b": 1.0,
        "val/recall/a; b": 2.0,
        "val/recall/ä": 3.0,
        "val/recall/" + 255 * "x": 4.0,
    }
    with connections() as tried:
        logger.log_metrics(given, 1)
        logger.log_metrics({name: -value for name, value in given.items()}, 2)
    assert not tried
    found = logger.experiment.get_run(logger.run_id).data.metrics
    assert set(found.values()) == {-1.0, -2.0, -3.0, -4.0} and len(found) == 4
    assert {"val/recall/a_ b", "val/recall/a_ b 2", "val/recall/_"} < set(found)


def test_a_server_or_a_folder_of_ones_own(run, environment, tmp_path):
    logger = MLFlowLogger(save_dir=str(tmp_path / "board"), run_name="mine", experiment_name="some")
    logger.attach(run, "MLFlowLogger")
    assert not (tmp_path / "board").exists()  # before anything is logged
    assert logger.experiment.get_run(logger.run_id).info.run_name == "mine"
    assert (tmp_path / "board").is_dir() and not (run.path / "mlflow").exists()
    os.environ["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:9"
    assert (
        MLFlowLogger()._uri == "http://127.0.0.1:9" and MLFlowLogger(save_dir="here")._uri is None
    )
    assert MLFlowLogger(tracking_uri="file:here")._uri == "file:here"


@pytest.mark.parametrize(
    ("uri", "reported"),
    [
        (
            "http://127.0.0.1:9",
            r"no server answers at http://127.0.0.1:9 \(.*refused.*\): MLFLOW_TRACKING_URI or",
        ),
        ("garbage://x", ".*garbage"),
    ],
)
def test_a_server_that_is_not_there_is_reported_soon_in_a_line(uri, reported, run, environment):
    logger = MLFlowLogger(tracking_uri=uri)
    logger.attach(run, "MLFlowLogger")
    began = time.monotonic()
    with pytest.raises(ValueError, match=f"^MLFlowLogger: {reported}"):
        _ = logger.experiment
    assert time.monotonic() - began < 20  # it would ask for minutes


@pytest.mark.slow
def test_a_run_continues_where_mlflow_has_it_no_more(colours, cli, capfd, caplog):
    fit_with(colours, capfd, *LOGGER)
    shutil.rmtree(RUN / "mlflow" / mlflow_run()[1].info.experiment_id / mlflow_run()[1].info.run_id)
    fit_with(colours, capfd, *LOGGER, "--resume", "--trainer.max_epochs", "2")
    assert (
        "MLFlowLogger: the earlier logs of this run no longer exist: it starts again"
        in caplog.messages
    )
    assert {step for _, step in mlflow_metrics()} >= {5, 8} and mlflow_run()[1].data.params
