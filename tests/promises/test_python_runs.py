"""`FittedRun`, the result of `finetune.fit`: a path with metrics, which a notebook shows."""

import os
from pathlib import Path

import numpy as np
import pytest
from run_folders import write_run

from finetune import FittedRun, load
from finetune.runs.intervals import wilson
from finetune.runs.run_dir import RunDir

# Predictions of five images of three classes; the last one is wrong.
LABELS, PREDICTED = [0, 1, 2, 0, 1], np.eye(3)[[0, 1, 2, 0, 2]] * 0.7 + 0.1


def test_accuracy_and_interval_are_those_of_the_files(tmp_path):
    run = FittedRun(write_run(tmp_path / "run", LABELS, PREDICTED))
    assert run.accuracy == 0.8 == run.result["test/accuracy"]
    assert run.interval == wilson(4, 5) and run.interval[0] < 0.8 < run.interval[1]
    assert run.record.config["seed_everything"] == 7
    assert "test accuracy 80.0 %" in repr(run) and str(run.path) in repr(run)
    (run.path / "test.json").unlink()
    RunDir(run.path).update(test=None)
    untested = FittedRun(run.path)
    assert (untested.accuracy, untested.interval, untested.result) == (None, None, {})
    assert "Not tested" in repr(untested) and "<img" not in untested._repr_html_()


def test_history_is_a_row_for_each_epoch_in_numbers(tmp_path):
    folder = write_run(tmp_path / "run", LABELS, PREDICTED)
    rows = [
        "epoch,step,seconds,train/loss,val/accuracy,lr-SGD/head",
        "1,3,0.5,1.25,,0.01",
        "2,6,0.5,nan,0.75,1e-05",
        "3,9,0",  # half written
    ]
    (folder / "metrics.csv").write_text("\n".join(rows))
    first, second = FittedRun(folder).history
    names = rows[0].split(",")
    assert first == dict(zip(names, [1, 3, 0.5, 1.25, None, 0.01], strict=True))
    assert np.isnan(second.pop("train/loss"))
    assert [type(first[name]) for name in ("epoch", "seconds")] == [int, float]
    assert list(second.values()) == [2, 6, 0.5, 0.75, 1e-05]
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(FittedRun(folder).history)
    assert list(table.columns) == names and table["val/accuracy"].dtype == float
    (folder / "metrics.csv").unlink()
    assert FittedRun(folder).history == []


def test_a_run_is_a_path_wherever_the_program_goes(run, monkeypatch):
    fitted = FittedRun(os.path.relpath(run()))
    monkeypatch.chdir("/")
    assert Path(fitted) == fitted.path and fitted.path.is_absolute() and fitted.best.is_file()
    assert load(fitted).class_names == load(fitted.best).class_names == ["blue", "green", "red"]
    (epoch,) = fitted.history
    assert epoch["epoch"] == 1 and 0 <= epoch["val/accuracy"] <= 1 and epoch["train/loss"] > 0


def test_a_notebook_shows_test_images_until_they_are_gone(run):
    fitted = FittedRun(run())
    assert "16 of 30 random test images" in fitted._repr_html_()
    table = fitted.path / "test_predictions.csv"
    table.write_text(table.read_text().replace("/test/", "/gone/"))
    page = FittedRun(fitted.path)._repr_html_()
    assert "<img" not in page and f"({round(fitted.accuracy * 30)} of 30;" in page
