"""The records of a run's folder, read back."""

import json
from dataclasses import replace

import numpy as np
import pytest
from run_folders import write_run

from finetune.runs.outcome import label_trials, num_in_split
from finetune.runs.record import read_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "name" / "fit" / "version_3", [0, 1], np.eye(2), ["a", "b"])


def test_what_is_there(run):
    record = read_run(run)
    assert (
        record.name == "name/fit/version_3"
        and record.setting("data", "init_args", "image_size") == 32
    )
    assert record.setting("data", "nothing", "here") is None
    assert record.line("val/loss") == ([1, 2, 3], [0.9, 0.6, 0.7])
    assert record.line("lr-SGD/head", "step") == ([3, 7, 11], [0.1, 0.05, 0.01])
    assert record.names("lr-") == ["lr-SGD/head"]
    assert record.answers is not None and record.answers.unread == ["broken.png"]


def test_what_is_not_there_is_empty(run):
    for path in run.iterdir():
        if path.name != "config.yaml":
            path.unlink()
    record = read_run(run)
    assert (
        record.about == record.result == record.seconds == {}
        and record.metrics == record.skipped == []
    )
    assert record.answers is None and record.best is None and record.line("val/loss") == ([], [])


def test_images_are_found_from_another_folder(run, tmp_path, monkeypatch):
    about = json.loads((run / "about.json").read_text()) | {"folder": str(tmp_path)}
    (run / "about.json").write_text(json.dumps(about))
    rows = run / "test_predictions.csv"
    rows.write_text(rows.read_text().replace(f"{run}/gone/", "photos/"))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/000.png").touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read_run(run).answers.paths == [str(tmp_path / "photos/000.png"), "photos/001.png"]


def test_a_metric_without_its_epoch_is_left_out(run):
    with open(run / "steps.csv", "a") as file:
        file.write("12,,0.2,,,,\n")
    assert read_run(run).line("val/loss")[0] == [1, 2, 3]


@pytest.mark.parametrize(("limit", "epoch"), [(None, 2), (2, 3), (0.05, 3), (500, 2)])
def test_the_best_is_by_the_images_that_were_measured(run, limit, epoch):
    """0.7 and 0.68 differ significantly on 4,000 images, and do not on 200."""
    record = read_run(run)
    rows = [
        {"epoch": str(i), "val/accuracy": str(value)} for i, value in enumerate((0.5, 0.7, 0.68))
    ]
    about = {"splits": {"val": {"counts": {"a": 3000, "b": 1000}}}}
    config = {"trainer": {"limit_val_batches": limit}, "data": {"init_args": {"batch_size": 100}}}
    assert replace(record, metrics=rows, about=about, config=config).best == (
        epoch,
        [0.7, 0.68][epoch - 2],
    )


def test_a_part_of_the_validation_images_has_its_share_of_trials():
    splits = {"val": {"counts": {"a": 30, "b": 60, "c": 0}, "num_images": 80}}
    assert num_in_split({"splits": splits}, "val") == 80
    full = label_trials({"splits": splits}, 80)
    assert full == pytest.approx(4 / (1 / 30 + 1 / 60))
    assert label_trials({"splits": splits}, 40) == pytest.approx(full / 2)
    # of one class an image the number of images is the sum
    assert num_in_split({"splits": {"val": {"counts": {"a": 30, "b": 60}}}}, "val") == 90
    assert num_in_split({}, "val") == 0 and label_trials({}, 0) == 0
