"""`finetune fit --folds`: each image is tested once, and the results and networks of the folds are joined.

The folds run in this process. `tests/promises/test_folds.py` starts processes.
"""

import csv
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from colours import QUICKEST, draw_colours
from labelled_files import LABELS, draw_labelled
from labelled_runs import write_table
from probabilities import probabilities
from promise import control, promise
from runs import fits_in_this_process
from sklearn import metrics

import finetune
from finetune import cli as command_line
from finetune.api import python_fit
from finetune.data.decode import decode
from finetune.fitting import several_fits as fold_fits
from finetune.fitting.joined_fits import write_predictions
from finetune.fitting.plan import Plan, read_plan
from finetune.fitting.time_budget import Costs, measure
from finetune.inference.predictor import Predictor
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.run_dir import RunDir
from finetune.runs.run_lock import release
from finetune.training.calibration import read_calibration

NUM_FOLDS = 2


def fold_runs(folder: Path) -> list[Path]:
    return [run.path for run in RunDir(folder).fits]


CLASSES = {"blue": 14, "green": 9}
OPTIONS = (
    *("--folds", str(NUM_FOLDS), "--model.class_weights", "balanced"),
    *("--threshold", "recall:0.8:green", "--data.val_fraction", "0.2"),
)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of different sizes, of images that `colours` does not have."""
    root = draw_colours(tmp_path_factory.mktemp("folds"), first=1, all=max(CLASSES.values()))
    root = root / "all"
    for path in sorted(root.rglob("*.png")):
        if int(path.stem) >= CLASSES.get(path.parent.name, 0):
            path.unlink()
    (root / "red").rmdir()
    return root


@pytest.fixture(scope="module", autouse=True)
def in_this_process() -> Iterator[None]:
    """Run the folds in this process."""

    before = dict(os.environ)
    with fits_in_this_process():
        yield
    os.environ.clear()
    os.environ.update(before)


def fit(images: Path, out: Path, *arguments: str) -> None:
    """Run `finetune fit` in this process, and release the locks of its runs."""
    run("fit", images, *QUICKEST, "--out", out, *arguments)


def run(*arguments: object) -> None:
    try:
        command_line.run([str(argument) for argument in arguments])
    finally:
        release()


@pytest.fixture(scope="module")
def finished(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished cross-validation of a table, with class weights and a threshold. Tests do not change it."""
    out = tmp_path_factory.mktemp("out")
    lines = [f"{path},{path.parent.name}" for path in sorted(images.rglob("*.png"))]
    (out / "images.csv").write_text("\n".join(["path,label", *lines]) + "\n")
    fit(out / "images.csv", out, *OPTIONS, "--data.root", str(images))
    return out / "fit/version_0"


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished cross-validation of images with several labels. Tests do not change it."""
    out = tmp_path_factory.mktemp("labels")
    table = write_table(draw_labelled(out / "images", train=72, test=1))
    rows = [
        line.rpartition(",")[0] for line in table.read_text().splitlines() if "/test/" not in line
    ]
    table.write_text("\n".join(rows) + "\n")  # without the column of splits
    options = ("--data.val_fraction", "0.25", "--lr", "0.01", "--data.resize", "whole")
    fit(table, out, "--folds", str(NUM_FOLDS), *options)
    return out / "fit/version_0"


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def result_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "test.json").read_text())


def best(run: Path) -> Path:
    return run / "checkpoints/best.ckpt"


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(best(run), weights_only=True)["state_dict"]


def fold_rows(run: Path) -> Iterator[tuple[Path, list[dict[str, str]]]]:
    """Yield the run of each fold, and its rows of predictions.csv."""
    rows = rows_of(run / "predictions.csv")
    for number, fold in enumerate(fold_runs(run), 1):
        yield fold, [row for row in rows if row["fold"] == str(number)]


@promise("groups")
def test_each_image_is_tested_once(images, finished):
    rows = rows_of(finished / "predictions.csv")
    assert sorted(row["path"] for row in rows) == sorted(map(str, images.rglob("*.png")))
    assert all(row["label"] == Path(row["path"]).parent.name for row in rows)
    for number, (fold, own) in enumerate(fold_rows(finished), 1):
        assert own == [
            {**row, "fold": str(number)} for row in rows_of(fold / "test_predictions.csv")
        ]


@promise("group-answers")
@pytest.mark.parametrize("has_labels", [False, True])
def test_folds_have_the_answers_of_all_groups(images, labelled, tmp_path, has_labels):
    table = tmp_path / "images.csv"
    if has_labels:
        rows = rows_of(labelled.parents[1] / "labels.csv")
        lines = [f"{row['path']},{row['labels']},{i // 2}" for i, row in enumerate(rows)]
        root = labelled.parents[1] / "images"
    else:
        paths = [path.relative_to(images) for path in sorted(images.rglob("*.png"))]
        lines = [f"{path},{path.parent},{path.parent}{i // 2}" for i, path in enumerate(paths)]
        root = images
    table.write_text("\n".join(["path,label,group", *lines]) + "\n")
    fit(table, tmp_path, "--folds", "2", "--data.val_fraction", "0.2", "--data.root", str(root))
    run = tmp_path / "fit/version_0"
    groups = rows_of(run / "group_predictions.csv")
    assert {row["group"] for row in groups} == {line.rpartition(",")[2] for line in lines}
    result = result_of(run)["groups"]
    if has_labels:
        right = sum(
            set(row["labels"].split(";")) == set(row["predicted"].split(";")) for row in groups
        )
        assert result["test/exact_match"] == pytest.approx(right / len(groups))
    else:
        right = sum(row["label"] == row["class"] for row in groups if not row["error"])
        assert result["test/accuracy"] == pytest.approx(
            right / sum(not row["error"] for row in groups)
        )
    assert f"{len(groups) - result['num_mixed']} groups" in str(RunDir(run).facts.test_by_group)


@control("groups")
def test_control_a_fold_twice_is_refused(finished, tmp_path):
    runs = fold_runs(finished)
    with pytest.raises(ValueError, match="more than one fold"):
        write_predictions([*runs, runs[0]], tmp_path / "all.csv")
    assert not (tmp_path / "all.csv").exists()


def test_a_fold_whose_network_knows_no_familiarity_has_empty_cells(tmp_path):
    for fold, columns in ((1, "path,class,familiar,error"), (2, "path,class,error")):
        (tmp_path / str(fold)).mkdir()
        text = f"{columns}\n{fold}.png,red{',' * (columns.count(',') - 1)}\n"
        (tmp_path / f"{fold}/test_predictions.csv").write_text(text)
    write_predictions([tmp_path / "1", tmp_path / "2"], tmp_path / "all.csv")
    first, second = rows_of(tmp_path / "all.csv")
    assert first.keys() == second.keys()
    assert [(row["class"], row["familiar"], row["fold"]) for row in (first, second)] == [
        ("red", "", "1"),
        ("red", "", "2"),
    ]


@promise("folds")
def test_metrics_are_those_of_all_images(finished):
    """Computed from predictions.csv, by their definitions."""
    rows = rows_of(finished / "predictions.csv")
    result = result_of(finished)
    names = result["class_names"]
    label = np.array([names.index(row["label"]) for row in rows])
    predicted = np.array([names.index(row["class"]) for row in rows])
    assert result["confusion_matrix"] == metrics.confusion_matrix(label, predicted).tolist()
    assert result["test/accuracy"] == np.mean(label == predicted)
    f1 = metrics.f1_score(label, predicted, average="macro", zero_division=0)
    assert result["test/f1"] == pytest.approx(f1, abs=1e-6)  # float32
    p = probabilities_of(rows, names)
    confidence = p.max(axis=1)  # of the more probable class, whatever the threshold
    is_right = p.argmax(axis=1) == label
    bins = np.minimum((confidence * 15).astype(int), 14)
    gaps = [abs(confidence[bins == b].sum() - is_right[bins == b].sum()) for b in range(15)]
    assert result["test/calibration_error"] == pytest.approx(sum(gaps) / len(rows), abs=1e-6)
    # the loss is the mean by the class weights of each fold
    runs = fold_runs(finished)
    losses = [result_of(fold)["test/loss"] for fold in runs]
    num_of_classes = [np.sum(result_of(fold)["confusion_matrix"], axis=1) for fold in runs]
    weights = [
        weights_of(fold)["class_weight"].numpy() @ num
        for fold, num in zip(runs, num_of_classes, strict=True)
    ]
    assert result["test/loss"] == pytest.approx(np.average(losses, weights=weights), rel=1e-6)
    # the control: with the weights of the other fold it is another one
    assert abs(np.average(losses, weights=weights[::-1]) - result["test/loss"]) > 1e-5
    assert [row["num_images"] for row in result["folds"]] == [num.sum() for num in num_of_classes]


def labels_of(rows: list[dict[str, str]], column: str) -> np.ndarray:
    return np.array([[name in row[column].split(";") for name in LABELS] for row in rows])


def probabilities_of(rows: list[dict[str, str]], names: Sequence[str] = LABELS) -> np.ndarray:
    return np.array([[float(row[f"p_{name}"]) for name in names] for row in rows])


@promise("folds")
def test_a_warning_of_several_folds_is_shown_once_with_their_number(finished):
    of_val = [doubt for doubt in RunDir(finished).facts.doubts if "val has only" in doubt]
    assert len(of_val) == 1 and "2 of 2 folds" in of_val[0]


def test_metrics_of_several_labels_are_those_of_all_images(labelled):
    """Computed from predictions.csv, by scikit-learn."""
    rows = rows_of(labelled / "predictions.csv")
    assert len(rows) == 72 and len({row["path"] for row in rows}) == 72
    labels = labels_of(rows, "labels")
    predicted = labels_of(rows, "predicted")
    result = result_of(labelled)
    expected = metrics.multilabel_confusion_matrix(labels, predicted)
    assert result["label_counts"] == expected.tolist()
    assert result["test/exact_match"] == metrics.accuracy_score(labels, predicted)
    hamming = metrics.hamming_loss(labels, predicted)
    assert result["test/hamming_distance"] == pytest.approx(hamming)
    for average in ("macro", "micro"):
        f1 = metrics.f1_score(labels, predicted, average=average, zero_division=0)
        assert result[f"test/f1_{average}"] == pytest.approx(f1)
    p = probabilities_of(rows)
    precision = metrics.average_precision_score(labels, p, average=None)
    found = [result[f"test/average_precision/{name}"] for name in LABELS]
    # images in one bin of 1,000 are in random order; here that moves a label by half an image at most
    assert found == pytest.approx(precision, abs=0.02)
    assert result["test/mAP"] == pytest.approx(np.mean(found))
    low, high = result["mAP_interval"]
    assert low <= result["test/mAP"] <= high < low + 0.5
    together = labels.T.astype(int) @ labels
    assert result["cooccurrence"] == together.tolist()
    losses = [row["loss"] for row in result["folds"]]
    sizes = [row["num_images"] for row in result["folds"]]
    assert result["test/loss"] == pytest.approx(np.average(losses, weights=sizes), rel=1e-6)
    # the control: the mean over the folds is another one
    assert abs(np.mean([row["mAP"] for row in result["folds"]]) - result["test/mAP"]) > 1e-3


@promise("folds")
@control("folds")
def test_no_image_is_measured_with_a_threshold_that_was_chosen_on_it(labelled, finished):
    for fold, rows in fold_rows(labelled):
        thresholds = read_calibration(read_checkpoint(best(fold))).thresholds
        assert (labels_of(rows, "predicted") == (probabilities_of(rows) >= thresholds)).all()
    for fold, rows in fold_rows(finished):
        (threshold,) = read_calibration(read_checkpoint(best(fold))).thresholds
        p = probabilities_of(rows, ("green",))[:, 0]
        assert [row["class"] for row in rows] == np.where(p >= threshold, "green", "blue").tolist()
    # the control: the thresholds of the joined network, which were chosen on these images, predict other labels
    rows = rows_of(labelled / "predictions.csv")
    joined = read_calibration(read_checkpoint(best(labelled))).thresholds
    assert (labels_of(rows, "predicted") != (probabilities_of(rows) >= joined)).any()


@pytest.mark.parametrize("kind", ["finished", "labelled"])
def test_the_joined_checkpoint_gives_the_mean_of_the_folds(kind, request):
    run = request.getfixturevalue(kind)
    sample_images = [decode(row["path"]) for row in rows_of(run / "predictions.csv")[::5]]
    folds = [Predictor(best(fold)) for fold in fold_runs(run)]
    expected = np.mean([probabilities(fold, sample_images) for fold in folds], axis=0)
    found = probabilities(best(run), sample_images)
    np.testing.assert_allclose(found, expected, atol=2e-6)  # float32
    # the control: without the calibration of the folds
    for fold in folds:
        assert fold.calibration.scale[0] != 1
        fold.calibration = fold.calibration.without_scaling()
    other = np.mean([probabilities(fold, sample_images) for fold in folds], axis=0)
    assert np.abs(other - expected).max() > 1e-3


def test_the_joined_network_has_the_thresholds_that_are_best_for_all_images(labelled, finished):
    joined = read_calibration(read_checkpoint(best(labelled)))
    assert result_of(labelled)["joined_calibration"] == joined.as_plain()
    rows = rows_of(labelled / "predictions.csv")
    labels = labels_of(rows, "labels")
    p = probabilities_of(rows)
    for k in (0, 1, 2):  # the fourth is rare, and has the threshold that is best for all labels
        f1 = [metrics.f1_score(labels[:, k], p[:, k] >= value) for value in np.unique(p[:, k])]
        reached = metrics.f1_score(labels[:, k], p[:, k] >= joined.thresholds[k])
        assert reached == max(f1) and min(f1) < max(f1) - 0.05
    chosen = read_calibration(read_checkpoint(best(finished)))
    rows = rows_of(finished / "predictions.csv")
    is_green = [row["label"] == "green" for row in rows]
    is_reported = probabilities_of(rows, ("green",))[:, 0] >= chosen.thresholds[0]
    assert chosen.reached == metrics.recall_score(is_green, is_reported) >= 0.8


@pytest.mark.parametrize("kind", ["finished", "labelled"])
def test_report_runs_and_predict_take_the_folder_of_all_folds(
    kind, cli, images, tmp_path, request, capsys
):
    run = request.getfixturevalue(kind)
    result = result_of(run)
    folds = result["folds"]
    num = sum(row["num_images"] for row in folds)
    cli("report", run, "--out", "report.html")
    page = (tmp_path / "report.html").read_text("utf-8")
    (table,) = re.findall(r'aria-label="results of each fold">(.*?)</table>', page, re.DOTALL)
    assert table.count("<tr><td>") == NUM_FOLDS and f"{num}, each tested in one of" in page
    capsys.readouterr()
    cli("runs", run.parents[1], "--json")
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["state"], row["num_images"], row["split"]) == ("finished", num, "test")
    if kind == "labelled":
        assert row["mAP"] == result["test/mAP"] and f"{folds[1]['mAP']:.3f}" in table
        return
    assert row["accuracy"] == result["test/accuracy"]
    assert f"{100 * folds[1]['num_right'] / folds[1]['num_images']:.1f} %" in table
    cli("predict", run, images, "--workers", 0, "--out", "found.csv")
    assert len(rows_of(tmp_path / "found.csv")) == num
    with pytest.raises(ValueError, match="in training"):
        cli("test", run, images, "--workers", 0)


def test_resume_of_folds_from_another_folder_ends_bit_for_bit_as_an_uninterrupted_one(
    images, finished, tmp_path, monkeypatch, capsys
):
    """A fold fails, and a bare `--resume` continues. The paths are relative to the folder where the run began.

    It is also the same as that of a table of these images, bit for bit.
    """
    (tmp_path / "a").mkdir()
    (tmp_path / "a/data").symlink_to(images)
    monkeypatch.chdir(tmp_path / "a")
    start = fold_fits.start_command

    def start_first(command: list[str], **_: object) -> int:
        return start(command) if read_plan(Path(command[-1])).settings.data.fold == 1 else 1

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(fold_fits, "start_command", start_first)
        fit(Path("data"), Path("runs"), *OPTIONS)
    assert stopped.value.code == 1
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a/runs/fit/version_0"
    run("fit", "--resume", "--out", "a/runs")
    # of the joined networks, and not of each fold
    assert capsys.readouterr().out.count("next: finetune predict") == 1
    both = (folder, finished)
    names = ("confusion_matrix", "test/loss", "joined_calibration")
    first, second = ({name: result_of(each)[name] for name in names} for each in both)
    assert first == second
    rows = [
        [{**row, "path": Path(row["path"]).name} for row in rows_of(each / "predictions.csv")]
        for each in both
    ]
    assert rows[0] == rows[1]
    weights, full = weights_of(folder), weights_of(finished)
    assert weights.keys() == full.keys()
    assert all(torch.equal(weights[name], full[name]) for name in weights)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans of folds, whose fits are not run: one of a new run fails."""
    started: list[Plan] = []

    def start(command: list[str], **_: object) -> int:
        if command[0] == "test":
            return 0
        started.append(read_plan(Path(command[-1])))
        return 0 if started[-1].run else 2

    monkeypatch.setattr(fold_fits, "start_command", start)
    return started


def test_resume_of_ended_folds_runs_nothing_again_unless_with_more_epochs(
    images, finished, copied, tmp_path, plans
):
    folder = copied
    data = ("--data.table", finished.parents[1] / "images.csv", "--data.root", images)
    run("fit", *data, "--folds", NUM_FOLDS, "--resume", "--out", tmp_path)
    assert plans == []
    assert (folder / "predictions.csv").read_bytes() == (finished / "predictions.csv").read_bytes()
    run("fit", "--resume", folder, "--epochs", "2")
    assert [plan.settings.trainer.max_epochs for plan in plans] == [2] * NUM_FOLDS
    assert [plan.run for plan in plans] == fold_runs(folder)
    run("runs", "rm", folder, "--yes")
    assert not folder.exists()


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished cross-validation, which a test may change."""
    folder = tmp_path / "fit/version_0"
    return shutil.copytree(finished, folder, ignore=shutil.ignore_patterns(".lock"))


def put_back(folder: Path) -> None:
    """Make a finished cross-validation one that was killed before its second fold."""
    shutil.rmtree(folder / "fit/fold_2")
    (folder / "test.json").unlink()
    RunDir(folder).update(ended=None, test=None)


@pytest.mark.parametrize("is_ended", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        ("--seed", "5"),
        ("--batch", "5"),
        ("--data.split_seed", "1"),
        ("--data.crop_and_flip", "false"),
    ],
)
def test_a_refused_resume_of_folds_changes_nothing(copied, change, is_ended):
    if not is_ended:
        put_back(copied)
    names = ("config.yaml", "run.json")
    before = [(copied / name).read_bytes() for name in names]
    with pytest.raises(ValueError, match="the run (would|is finished)") as raised:
        run("fit", "--resume", copied, *change)
    assert "allow_changes" not in str(raised.value)  # which folds refuse
    assert [(copied / name).read_bytes() for name in names] == before
    assert (copied / "fit/fold_2").exists() == is_ended


@pytest.mark.parametrize("longer", [("--epochs", "2"), ("--patience", "3")])
def test_folds_without_last_ckpt_refuse_to_go_on(copied, plans, longer):
    for fold in fold_runs(copied):
        (fold / "checkpoints/last.ckpt").unlink()
    before = (copied / "config.yaml").read_bytes()
    with pytest.raises(ValueError, match=r"last\.ckpt"):
        run("fit", "--resume", copied, *longer)
    assert plans == [] and (copied / "config.yaml").read_bytes() == before
    run("fit", "--resume", copied)


def test_a_fold_that_has_not_begun_trains_on_the_images_of_the_others(
    images, finished, copied, tmp_path
):
    put_back(copied)
    table = finished.parents[1] / "images.csv"
    before = (copied / "config.yaml").read_bytes()
    fewer = tmp_path / "fewer.csv"
    fewer.write_text("\n".join(table.read_text().splitlines()[:-2]) + "\n")
    with pytest.raises(ValueError, match="the run would"):
        run("fit", "--resume", copied, "--data.table", fewer, "--data.root", images)
    assert (copied / "config.yaml").read_bytes() == before


def test_folds_take_a_change_whose_command_was_killed_before_the_first_of_them(
    copied, plans, monkeypatch
):
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(fold_fits, "start_command", lambda *_, **__: 137)
        run("fit", "--resume", copied, "--epochs", "3")
    run("fit", "--resume", copied)
    assert [plan.run for plan in plans] == fold_runs(copied)
    assert [plan.changes for plan in plans] == [{"trainer.max_epochs": (1, 3)}] * NUM_FOLDS


def test_minutes_are_shared_by_folds_and_a_first_fold_that_fails_leaves_no_folder(
    images, tmp_path, plans, monkeypatch
):
    seconds = []

    def measured(*arguments: Any) -> Costs:
        seconds.append(arguments[4])
        return measure(*arguments)

    monkeypatch.setattr("finetune.fitting.minutes.measure", measured)
    quick = [word for word in QUICKEST if word not in ("--trainer.max_epochs", "1")]
    with pytest.raises(SystemExit) as stopped:
        run("fit", images, *quick, "--out", tmp_path, "--folds", "3", "--minutes", "1.5")
    (first,) = plans
    assert seconds == [30] and first.settings.minutes is None
    assert first.settings.trainer.max_epochs >= 1 and first.settings.data.fold == 1
    assert stopped.value.code == 2 and not (tmp_path / "fit").exists()


def test_fit_in_python_with_folds_has_the_result_of_all(images, finished, monkeypatch):
    """`test_started_processes.py` runs a fit in processes."""
    given: list[Plan] = []
    monkeypatch.setattr(python_fit, "run_plan", lambda plan: given.append(plan) or finished)
    fitted = finetune.fit(images, folds=NUM_FOLDS, epochs=1, backbone="small_cnn", weights=None)
    assert [plan.settings.folds for plan in given] == [NUM_FOLDS]
    assert fitted.accuracy == result_of(finished)["test/accuracy"]
    assert [row["fold"] for row in fitted.history] == [1, 2] and fitted.best == best(finished)


def test_images_that_no_fold_tests_are_counted(images, tmp_path, caplog):
    """A copy of an image that its fold trains on is skipped, and so may all the copies be."""
    shutil.copytree(images, tmp_path / "images")
    original = min((tmp_path / "images/green").iterdir())
    for number in range(6):
        shutil.copy(original, original.with_name(f"copy{number}.png"))
    fit(tmp_path / "images", tmp_path, "--folds", str(NUM_FOLDS))
    record = RunDir(tmp_path / "fit/version_0").facts
    with open(tmp_path / "fit/version_0/predictions.csv", newline="") as file:
        num_tested = len(list(csv.DictReader(file)))
    num = sum(CLASSES.values()) + 6
    text = f"{num - num_tested} of {num} images were not tested: "
    assert num_tested == num - 7  # each of the seven has a copy in the other fold
    assert sum(text in doubt for doubt in record.doubts) == caplog.text.count(text) == 1
