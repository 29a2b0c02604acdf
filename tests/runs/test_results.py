"""The result on the screen and in its file."""

import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from colours import QUICKEST
from tiny_module import QUIET, Tiny, loader, trainer

from finetune.runs.folder import Run
from finetune.runs.metrics_csv import is_defined, read_metrics
from finetune.runs.result_file import read_result, write_result
from finetune.runs.results import Results, Skipped

pytestmark = QUIET


@pytest.mark.parametrize(("split", "accuracy"), [("test", 0.9375), ("val", 0.75)])
def test_the_result_is_printed_and_written(tmp_path, capsys, split, accuracy):
    run = Run(tmp_path, split)
    run.choose()
    measure = trainer(tmp_path, Results(run))
    (measure.test if split == "test" else measure.validate)(Tiny(), loader(), verbose=False)
    lines = capsys.readouterr().out.splitlines()
    assert f"{split}/accuracy {accuracy:.4f}" in lines
    assert [line.split()[0] for line in lines] == [
        *(f"{split}/{n}" for n in ("accuracy", "loss", "f1", "calibration_error")),
        split if split == "test" else "validation",
        "no",  # temperature
    ]
    named = "test" if split == "test" else "validation"
    assert lines[-2].startswith(f"{named} accuracy 87.5 % (7 of 8; ")
    written = json.loads(run.file(f"{split}.json").read_text())
    assert written[f"{split}/accuracy"] == pytest.approx(accuracy)
    assert written["class_names"] == ["a", "b"] and written["confusion_matrix"] == [[3, 1], [0, 4]]
    assert written["checkpoint"] is None


@pytest.mark.parametrize("name", ["confusion_matrix", "cooccurrence"])
def test_a_result_of_many_classes_grows_with_the_images_not_with_the_square_of_the_classes(
    tmp_path, name
):
    matrix = np.zeros((1200, 1200), int)
    rng = np.random.default_rng(0)
    np.add.at(matrix, (rng.integers(1200, size=6000), rng.integers(1200, size=6000)), 1)
    result = {
        "test/accuracy": 0.5,
        "class_names": [f"c{i}" for i in range(1200)],
        name: matrix.tolist(),
    }
    path = tmp_path / "test.json"
    write_result(path, {**result, "test_folder": {name: matrix.tolist()}})
    assert path.stat().st_size < 1_000_000
    read = read_result(path)
    assert read.pop("test_folder")[name] == matrix.tolist() and read == result
    few = {"class_names": ["a", "b"], name: [[1, 2], [3, 4]]}
    write_result(path, few)
    assert json.loads(path.read_text()) == few == read_result(path)


def test_validation_within_fit_is_no_result(run, tmp_path, capsys):
    trainer(tmp_path, Results(run)).fit(Tiny(), loader(), loader())
    assert capsys.readouterr().out == "" and list(run.path.glob("[!.]*")) == []


def test_only_the_first_device_reports(run, capsys):
    Results(run).on_test_end(SimpleNamespace(is_global_zero=False), Tiny())
    assert capsys.readouterr().out == "" and list(run.path.glob("[!.]*")) == []


def test_an_error_stays_the_news_where_the_list_of_images_cannot_be_written(tmp_path, caplog):
    run = Run(tmp_path, "fit")
    run.file = lambda name: tmp_path / "nowhere" / name
    run.choose()
    skipped = Skipped(run)
    skipped.errors.add("a.png: truncated")
    skipped.on_exception(SimpleNamespace(is_global_zero=True), Tiny(), RuntimeError("the news"))
    assert "skipped.txt is incomplete" in caplog.text


def test_numbers_of_a_class_without_images_are_null_and_empty(colours, cli, tmp_path):
    for split in ("train", "val", "test"):
        shutil.copytree(
            colours / ("train" if split == "train" else "test"), tmp_path / "data" / split
        )
    for split in ("val", "test"):
        shutil.rmtree(tmp_path / "data" / split / "green")
    cli("fit", "--data.root", tmp_path / "data", *QUICKEST, "--trainer.max_epochs", "2")
    folder = tmp_path / "runs/fit/version_0"
    result = json.loads(
        (folder / "test.json").read_text(), parse_constant=lambda name: pytest.fail(name)
    )
    matrix = np.array(result["confusion_matrix"])
    assert matrix.sum(axis=1).tolist() == [10, 0, 10] and result["test/recall/green"] is None
    with np.errstate(invalid="ignore"):
        f1 = 2 * matrix.diagonal() / (matrix.sum(axis=0) + matrix.sum(axis=1))
    assert result["test/f1"] == pytest.approx(f1[[0, 2]].mean())
    for name, num_predicted in zip(("blue", "green", "red"), matrix.sum(axis=0), strict=True):
        assert (result[f"test/precision/{name}"] is None) == (num_predicted == 0)
    for row in read_metrics(folder / "metrics.csv"):
        assert (
            row["val/recall/green"] == ""
            and float(row["val/recall/red"]) >= 0
            and "nan" not in row.values()
        )
    assert "nan" not in (folder / "steps.csv").read_text()


def test_a_loss_that_is_not_a_number_is_not_hidden():
    names = "train/loss", "train/loss_epoch", "val/loss", "val/recall/loss", "val/f1", "lr-SGD/head"
    assert [is_defined(name, math.nan) for name in names] == [True, True, True, False, False, False]
    assert all(is_defined(name, 0.0) for name in names)
