"""The result of `finetune.fit`: paths, metrics, and HTML for a notebook."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from fit_words import QUICK
from run_folders import write_run

from finetune import FittedRun, fit, load
from finetune.runs.statistics import wilson

# Predictions of five images of three classes; the last one is wrong.
LABELS, PREDICTED = [0, 1, 2, 0, 1], np.eye(3)[[0, 1, 2, 0, 2]] * 0.7 + 0.1


@pytest.fixture(scope="module")
def fitted(colours, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("fitted"))
        return fit(colours, **QUICK)


def test_numbers_are_those_of_the_files(tmp_path):
    run = FittedRun(write_run(tmp_path / "run", LABELS, PREDICTED))
    assert run.accuracy == 0.8 == run.result["test/accuracy"]
    assert run.interval == wilson(4, 5) and run.interval[0] < 0.8 < run.interval[1]
    assert (
        run.best == tmp_path / "run/checkpoints/best.ckpt"
        and run.record.config["seed_everything"] == 7
    )
    assert repr(run).startswith(f"<run in {tmp_path}/run: test accuracy 80.0 % (4 of 5; ")


def test_history_is_a_row_for_each_epoch_in_numbers(tmp_path):
    folder = write_run(tmp_path / "run", LABELS, PREDICTED)
    rows = [
        "epoch,step,seconds,train/loss,val/accuracy,lr-SGD/head",
        "1,3,0.5,1.25,,0.01",
        "2,6,0.5,nan,0.75,1e-05",
    ]
    (folder / "metrics.csv").write_text("\n".join([*rows, "3,9,0"]))  # the last one half written
    history = FittedRun(folder).history
    assert history[0] == {
        **{
            "epoch": 1,
            "step": 3,
            "seconds": 0.5,
            "train/loss": 1.25,
            "val/accuracy": None,
            "lr-SGD/head": 0.01,
        }
    }
    assert len(history) == 2 and np.isnan(history[1].pop("train/loss"))
    assert history[1] == {
        "epoch": 2,
        "step": 6,
        "seconds": 0.5,
        "val/accuracy": 0.75,
        "lr-SGD/head": 1e-05,
    }
    assert type(history[1]["epoch"]) is int and type(history[1]["seconds"]) is float
    (folder / "metrics.csv").unlink()
    assert FittedRun(folder).history == []


def test_history_is_of_the_run(fitted):
    (epoch,) = fitted.history
    assert (
        epoch["epoch"] == 1
        and epoch["step"] == 4
        and 0 <= epoch["val/accuracy"] <= 1
        and epoch["train/loss"] > 0
    )
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(fitted.history)
    assert list(table.columns) == list(epoch) and table["val/accuracy"].dtype == float


def test_it_is_a_path_wherever_the_program_goes(fitted, monkeypatch):
    monkeypatch.chdir("/")
    assert Path(fitted) == fitted.path and fitted.path.is_absolute() and fitted.best.is_file()
    assert fitted.path.match("fitted*/runs/fit/version_0")
    assert load(fitted).class_names == load(fitted.best).class_names == ["blue", "green", "red"]
    assert os.listdir(fitted)


@pytest.mark.slow
def test_a_run_that_was_not_tested_says_so(colours, quick):
    quick["options"]["test_after_fit"] = False
    run = fit(colours, **quick)
    assert (run.accuracy, run.interval, run.result) == (None, None, {})
    assert "Not tested" in repr(run) and "<img" not in run._repr_html_()


def test_a_notebook_shows_result_curves_and_images(fitted, colours):
    page = fitted._repr_html_()
    share = f"test accuracy {100 * fitted.accuracy:.1f} % ({round(fitted.accuracy * 30)} of 30; "
    assert share in page
    assert len(re.findall(r"<svg ", page)) == 2 and "The accuracy by epoch" in page
    assert "16 of 30 random test images" in page and len(page) < 150_000
    assert not re.search(r"<script|<style|https?://(?!www\.w3\.org)|src=\"(?!data:)", page)
    assert page == fitted._repr_html_()


@pytest.mark.slow
def test_images_that_are_gone_are_left_out(colours, quick, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(colours, copy)
    run = fit(copy, **quick)
    assert "16 of 30 random test images" in run._repr_html_()  # control
    shutil.rmtree(copy)
    page = run._repr_html_()
    assert "<img" not in page and f"({round(run.accuracy * 30)} of 30; 95 % interval " in page
