"""The report of a running fit appears after a while, and takes at most a hundredth of the time."""

from types import SimpleNamespace

import numpy as np
import pytest
from run_folders import write_run

from finetune.runs import html_report, live_report
from finetune.runs.folder import Run
from finetune.runs.live_report import LiveReport

pytestmark = pytest.mark.usefixtures("without_charts")
FIRST, OTHER = (SimpleNamespace(is_global_zero=is_first) for is_first in (True, False))


@pytest.fixture
def tested(tmp_path) -> Run:
    """A run with the result of its test."""
    return Run(tmp_path, "fit", write_run(tmp_path / "run", [0, 1], np.eye(2), ["a", "b"]))


@pytest.fixture
def run(tested) -> Run:
    for name in ("test.json", "test_predictions.csv"):
        tested.file(name).unlink()
    return tested


def due(run: Run) -> LiveReport:
    """A callback that writes its page at once."""
    callback = LiveReport(run)
    callback._cost = 0.0
    return callback


def page_of(run: Run) -> str:
    return run.file("report.html").read_text("utf-8")


def test_it_takes_a_hundredth_of_the_time(run, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(live_report.time, "monotonic", lambda: clock.now)
    written = []

    def write(record, viewer, versions, is_running):
        assert is_running and viewer is None
        written.append(clock.now)
        clock.now += 1.5  # what it costs

    monkeypatch.setattr(html_report, "write_report", write)
    callback = LiveReport(run)
    callback.on_train_start(FIRST)
    for _ in range(100):
        clock.now += 10
        callback.on_train_epoch_start(FIRST)
    assert written[0] == 20
    assert np.diff(written).min() >= 150 and len(written) >= 6


def test_the_result_of_before_a_run_was_prolonged_is_left_out(tested):
    callback = due(tested)
    callback.on_train_epoch_start(FIRST)
    text = page_of(tested)
    assert "validation accuracy " in text and "test accuracy" not in text


def test_a_page_that_can_not_be_written_ends_no_training(run, caplog):
    run.file("report.html").mkdir()
    due(run).on_train_epoch_start(FIRST)
    assert "report.html could not be written" in caplog.text


def test_the_page_says_that_more_is_to_come_until_the_run_is_stopped(run):
    callback = LiveReport(run)
    callback.on_exception(FIRST)
    assert not run.file("report.html").exists()  # before its time there is none
    callback._cost = 0.0
    callback.on_train_start(FIRST)
    callback.on_train_epoch_start(OTHER)
    assert not run.file("report.html").exists()
    callback.on_train_epoch_start(FIRST)
    assert "Still running" in page_of(run)
    callback.on_exception(FIRST)
    assert "Still running" not in page_of(run)


def test_a_prolonged_run_does_not_show_the_test_of_before(tested):
    tested.file("report.html").write_text("test accuracy 100.0 % (2 of 2")
    callback = LiveReport(tested)
    callback.on_exception(FIRST)
    assert "test accuracy" in page_of(tested)  # its best.ckpt is that one
    callback.on_train_start(FIRST)
    assert not tested.file("report.html").exists()
