"""The page of a run that goes on: there after a while, and never at more than a hundredth of the time."""

from types import SimpleNamespace

import numpy as np
import pytest
from run_folders import write_run

from finetune.runs import html_report, live_report
from finetune.runs.folder import Run
from finetune.runs.live_report import LiveReport, end_page


@pytest.fixture
def run(tmp_path) -> Run:
    path = write_run(tmp_path / "run", [0, 1], np.eye(2), ["a", "b"])
    for name in ("test.json", "test_predictions.csv"):
        (path / name).unlink()
    return Run(tmp_path, "fit", path)


def test_it_takes_a_hundredth_of_the_time(run, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(live_report.time, "monotonic", lambda: clock.now)
    written = []

    def write(record, lens, versions, is_running):
        assert is_running and lens is None
        written.append(clock.now)
        clock.now += 1.5  # what it costs

    monkeypatch.setattr(html_report, "write_report", write)
    callback, trainer = LiveReport(run), SimpleNamespace(is_global_zero=True)
    callback.on_train_start(trainer)
    for _ in range(100):
        clock.now += 10
        callback.on_train_epoch_start(trainer)
    assert written[0] == 20
    assert np.diff(written).min() >= 150 and len(written) >= 6


def test_the_page_says_that_more_is_to_come(run, monkeypatch):
    callback = LiveReport(run)
    callback._cost = 0.0
    callback.on_train_start()
    callback.on_train_epoch_start(SimpleNamespace(is_global_zero=False))
    assert not run.file("report.html").exists()
    callback.on_train_epoch_start(SimpleNamespace(is_global_zero=True))
    assert "Still running" in run.file("report.html").read_text("utf-8")


def test_the_result_of_before_a_run_was_prolonged_is_left_out(tmp_path):
    run = Run(tmp_path, "fit", write_run(tmp_path / "run", [0, 1], np.eye(2), ["a", "b"]))
    callback = LiveReport(run)
    callback._cost = 0.0
    callback.on_train_epoch_start(SimpleNamespace(is_global_zero=True))
    text = run.file("report.html").read_text("utf-8")
    assert "of the validation pictures are named rightly" in text and "test pictures are named rightly" not in text


def test_a_page_that_can_not_be_written_ends_no_training(run, caplog):
    run.file("report.html").mkdir()
    callback = LiveReport(run)
    callback._cost = 0.0
    for _ in range(3):
        callback.on_train_epoch_start(SimpleNamespace(is_global_zero=True))
    assert len(caplog.messages) == 1 and "no page while this run goes on" in caplog.text


def test_a_run_that_is_stopped_no_longer_goes_on(run, monkeypatch):
    callback = LiveReport(run)
    callback.on_exception(SimpleNamespace(is_global_zero=True))
    assert not run.file("report.html").exists()  # before its time there is none
    callback._cost = 0.0
    callback.on_train_epoch_start(SimpleNamespace(is_global_zero=True))
    assert "Still running" in run.file("report.html").read_text("utf-8")
    callback.on_exception(SimpleNamespace(is_global_zero=True))
    assert "Still running" not in run.file("report.html").read_text("utf-8")
    run.file("config.yaml").write_text("a: [")  # whatever is wrong, what stops the run is the news
    callback.on_exception(SimpleNamespace(is_global_zero=True))


def test_a_prolonged_run_that_is_stopped_soon_does_not_show_the_test_of_before(tmp_path):
    run = Run(tmp_path, "fit", write_run(tmp_path / "run", [0, 1], np.eye(2), ["a", "b"]))
    run.file("report.html").write_text("2 of 2 test pictures are named rightly")
    callback, first = LiveReport(run), SimpleNamespace(is_global_zero=True)
    callback.on_exception(first)
    assert "test pictures are named rightly" in run.file("report.html").read_text("utf-8")  # its best.ckpt is that one
    for name in ("test.json", "test_predictions.csv"):
        run.file(name).unlink()
    callback.on_exception(SimpleNamespace(is_global_zero=False))
    assert "test pictures are named rightly" in run.file("report.html").read_text("utf-8")
    callback.on_exception(first)
    assert "test pictures are named rightly" not in run.file("report.html").read_text("utf-8")


def test_the_page_of_a_run_that_is_over_says_so_with_its_result(tmp_path, caplog):
    run = Run(tmp_path, "fit", write_run(tmp_path / "run", [0, 1], np.eye(2), ["a", "b"]))
    callback, page = LiveReport(run), run.file("report.html")
    callback._cost = 0.0
    end_page(run)
    assert not page.exists()
    page.write_text("all that came out")
    end_page(run)
    assert page.read_text() == "all that came out"
    for is_damaged in (False, True):
        callback._since, callback._cost = 0.0, 0.0
        callback.on_train_epoch_start(SimpleNamespace(is_global_zero=True))
        assert "Still running" in page.read_text("utf-8")
        if is_damaged:  # whatever is wrong, what ends the run is the news
            run.file("config.yaml").write_text("a: [")
        end_page(run)
        assert ("Still running" in page.read_text("utf-8")) == is_damaged
        assert ("2 of 2 test pictures are named rightly" in page.read_text("utf-8")) != is_damaged
    assert len(caplog.messages) == 1 and "report.html still says that the run goes on" in caplog.text
