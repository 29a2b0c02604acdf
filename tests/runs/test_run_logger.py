"""What the loggers have in common: their folder, resuming, missing packages, several devices."""

import json
import math
from datetime import date
from pathlib import Path

import pytest
from colours import QUICKEST
from logged_fits import (
    RUN,
    connections,
    events,
    hyperparameters,
    mlflow_metrics,
    mlflow_run,
    scalars,
    settings,
    steps,
)
from processes import finetune as finetune_command

import finetune
from finetune.runs.folder import Run
from finetune.runs.metrics_csv import MetricsCSV
from finetune.runs.run_logger import RunLogger, attach, flatten, run_loggers

KINDS = ["MLFlowLogger", "TensorBoardLogger", "WandbLogger"]


class Silent(RunLogger):
    name = version = log_metrics = None
    place = "silent"


def test_settings_by_dotted_names():
    nested = {"a": {"b": {"c": 1}, "d": None}, "e": [1, {"f": 2}], "g": {}, "h": "text", "i": False}
    nested["j"] = date(2026, 1, 2)  # which YAML makes of a name such as 2026-01-02
    plain = {
        "a.b.c": 1,
        "a.d": "null",
        "e": '[1, {"f": 2}]',
        "h": "text",
        "i": False,
        "j": '"2026-01-02"',
    }
    assert flatten(nested) == plain


def test_a_run_that_continues_finds_each_of_its_loggers_again(run):
    first = [Silent(), MetricsCSV(run), Silent()]
    attach(first, run)
    assert run_loggers(first) == [first[0], first[2]]
    assert [logger._earlier_name() for logger in run_loggers(first)] == [None, None]
    for logger, name in zip(run_loggers(first), ("one", "two"), strict=True):
        logger._remember(name)
    second = [Silent(), Silent()]
    attach(second, Run(run.root, "fit", run.path))
    assert not any(logger.is_continued for logger in second)
    assert [logger._earlier_name() for logger in second] == ["one", "two"] and all(
        logger.is_continued for logger in second
    )


def test_the_folder_is_chosen_when_it_is_needed(tmp_path):
    run, logger = Run(tmp_path / "some", "fit"), Silent()
    logger.attach(run, "Silent")
    assert run.path is None
    assert logger._run_folder() == str(tmp_path / "some/fit/version_0/silent")
    assert logger._title() == "some-fit-version_0"


class Full(RunLogger):
    """Of a library that raises what it likes."""

    name = version = None
    written = 0

    def log_config(self, settings):
        raise KeyError("no\nroom")

    def log_metrics(self, metrics, step=None):
        self.written += 1
        raise RuntimeError("the disk\nis full")


def test_a_logger_that_fails_says_so_once_and_stops_nothing(caplog):
    logger = Full()
    for step in range(3):
        logger.log_metrics({"a": 1.0}, step)
    logger.close()
    assert caplog.messages == ["Full: the disk is full: it logs nothing more"]
    assert logger.has_failed and logger.written == 1


class Kept(RunLogger):
    """Stores all that is logged."""

    name = version = None

    def log_metrics(self, metrics, step=None):
        self.metrics = metrics


def test_numbers_that_are_not_defined_are_not_logged():
    logger = Kept()
    logger.log_metrics(
        {"val/loss": math.nan, "val/recall/cat": math.nan, "val/recall/dog": 0.0}, step=3
    )
    assert list(logger.metrics) == ["val/loss", "val/recall/dog"]


def test_one_that_can_not_begin_is_an_error():
    with pytest.raises(ValueError, match=r"^Full: 'no\\nroom'$"):
        Full().log_config({})


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_run_each_says_whose_it_is(kind, environment):
    with pytest.raises(
        ValueError,
        match=f"finetune.{kind} belongs to a run",
    ):
        _ = getattr(finetune, kind)().experiment


@pytest.mark.slow
def test_of_two_devices_the_first_logs_alone(colours, tmp_path, monkeypatch):
    loggers = ",".join(kind.removesuffix("Logger").lower() for kind in KINDS)
    several = ["--trainer.devices", "2", "--trainer.log_every_n_steps", "1"]
    given = ["--data.root", colours, *QUICKEST, *several, "--trainer.logger", loggers]
    result = finetune_command("fit", *given, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    reported = [line.split()[0] for line in result.stderr.splitlines()]
    # and nothing of a library's
    assert reported == ["images:", "network:", "training:", "val", "epoch"]
    monkeypatch.chdir(tmp_path)
    assert scalars() == pytest.approx(steps(), rel=1e-6) and mlflow_metrics() == steps()
    assert hyperparameters() == [settings()]
    assert len(list((RUN / "wandb").glob("offline-run-*"))) == 1
    mlflow_run()  # there is one


@pytest.mark.slow
def test_what_measures_and_predicts_logs_in_a_run_of_its_own(colours, cli, capfd):
    cli("fit", "--data.root", colours, *QUICKEST, "--test_after_fit", "false")
    with connections() as tried:
        for kind in KINDS:
            cli("test", RUN, "--trainer.logger", f"finetune.{kind}")
        cli("predict", RUN, colours / "test", "--logger", "tensorboard")
    assert not tried
    for i, kind in enumerate(KINDS):
        (place,) = [one for one in Path(f"runs/test/version_{i}").iterdir() if one.is_dir()]
        assert place.name == kind.removesuffix("Logger").lower() and any(
            one.is_file() for one in place.rglob("*")
        )
    result = events(Path("runs/test/version_1/tensorboard"))
    measured = json.loads(Path("runs/test/version_1/test.json").read_text())["test/accuracy"]
    assert [event.value for event in result.Scalars("test/accuracy")] == pytest.approx([measured])
    assert any(Path("runs/predict/version_0/tensorboard").iterdir())
