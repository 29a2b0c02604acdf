"""`finetune fit --folds`: each image is tested once, and the results and networks of the folds are joined.

The folds run in this process. `tests/integration/test_fold_runs.py` starts processes.
"""

import contextlib
import csv
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from colours import QUICKEST, draw_colours

from finetune import cli as command_line
from finetune.commands import cross_validation
from finetune.data.decode import decode
from finetune.inference.predictor import Predictor
from finetune.models.checkpoint_values import MAX_FOLDS
from finetune.models.ensemble import MAX_MEMBERS
from finetune.runs.fold_record import FoldRecord, fold_runs, read_folds, write_folds
from finetune.runs.run_lock import release
from finetune.runs.run_table import read_row
from finetune.system.messages import WrongUsage

NUM_FOLDS = 3


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of 12 images each."""
    return draw_colours(tmp_path_factory.mktemp("folds"), all=12) / "all"


@pytest.fixture(scope="module", autouse=True)
def in_this_process() -> Iterator[list[list[str]]]:
    """Run the folds in this process; return their command lines."""
    commands: list[list[str]] = []

    def start(command: list[str], cwd: str = ".") -> int:
        commands.append(command)
        with contextlib.chdir(cwd):
            command_line.run(command)
        release()
        return 0

    before = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_validation, "start_command", start)
        patch.setattr(cross_validation, "wait_for", lambda code: code)
        yield commands
    os.environ.clear()
    os.environ.update(before)


def fit(images: Path, out: Path, *arguments: str) -> None:
    """Run `finetune fit` in this process, and release the locks of its runs."""
    try:
        command_line.run(["fit", str(images), *QUICKEST, "--out", str(out), *arguments])
    finally:
        release()


@pytest.fixture(scope="module")
def finished(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished cross-validation, which nobody changes."""
    out = tmp_path_factory.mktemp("out")
    fit(images, out, "--folds", str(NUM_FOLDS))
    return out / "fit/version_0"


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def result_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "test.json").read_text())


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints/best.ckpt", weights_only=True)["state_dict"]


def test_each_image_is_tested_once(images, finished):
    rows = rows_of(finished / "predictions.csv")
    assert sorted(row["path"] for row in rows) == sorted(map(str, images.rglob("*.png")))
    assert all(row["label"] == Path(row["path"]).parent.name for row in rows)
    for number, run in enumerate(fold_runs(finished, NUM_FOLDS), 1):
        own = [{**row, "fold": str(number)} for row in rows_of(run / "test_predictions.csv")]
        assert [row for row in rows if row["fold"] == str(number)] == own


def test_control_a_fold_twice_is_refused(finished, tmp_path):
    runs = fold_runs(finished, NUM_FOLDS)
    with pytest.raises(ValueError, match="tested in more than one fold"):
        cross_validation.write_predictions([runs[0], runs[1], runs[0]], tmp_path / "all.csv")
    assert not (tmp_path / "all.csv").exists()


def test_metrics_are_those_of_all_images(finished):
    """Computed from predictions.csv, by their definitions."""
    rows = rows_of(finished / "predictions.csv")
    result = result_of(finished)
    names = result["class_names"]
    label = np.array([names.index(row["label"]) for row in rows])
    predicted = np.array([names.index(row["class"]) for row in rows])
    confidence = np.array([float(row["probability"]) for row in rows])
    matrix = np.zeros((3, 3), int)
    np.add.at(matrix, (label, predicted), 1)
    assert result["confusion_matrix"] == matrix.tolist()
    assert result["test/accuracy"] == np.mean(label == predicted)
    f1 = [2 * matrix[k, k] / (matrix[k].sum() + matrix[:, k].sum()) for k in range(3)]
    assert result["test/f1"] == pytest.approx(np.mean(f1), abs=1e-6)  # float32
    bins = np.minimum((confidence * 15).astype(int), 14)
    gaps = [
        abs(confidence[bins == b].sum() - (label == predicted)[bins == b].sum()) for b in range(15)
    ]
    assert result["test/calibration_error"] == pytest.approx(sum(gaps) / len(rows), abs=1e-6)
    parts = [result_of(run) for run in fold_runs(finished, NUM_FOLDS)]
    sizes = [np.sum(part["confusion_matrix"]) for part in parts]
    loss = sum(part["test/loss"] * size for part, size in zip(parts, sizes, strict=True)) / 36
    assert result["test/loss"] == pytest.approx(loss)
    assert [row["num_images"] for row in result["folds"]] == sizes
    # the control: the mean over the folds differs, since they differ in size
    assert len(set(sizes)) > 1


def test_a_table_gives_the_folds_of_the_folders(images, finished, tmp_path):
    lines = [f"{path},{path.parent.name}" for path in sorted(images.rglob("*.png"))]
    (tmp_path / "images.csv").write_text("\n".join(["path,label", *lines]) + "\n")
    fit(tmp_path / "images.csv", tmp_path, "--folds", str(NUM_FOLDS))
    table = tmp_path / "fit/version_0"
    assert (table / "predictions.csv").read_text() == (finished / "predictions.csv").read_text()
    # several labels are refused before anything is trained
    lines = [f"{path},{path.parent.name};all" for path in sorted(images.rglob("*.png"))]
    (tmp_path / "several.csv").write_text("\n".join(["path,label", *lines]) + "\n")
    with pytest.raises(WrongUsage, match="folds need one label per image"):
        fit(tmp_path / "several.csv", tmp_path / "several", "--folds", str(NUM_FOLDS))


def test_a_fold_is_the_fit_with_its_number(images, finished, tmp_path):
    fit(images, tmp_path, "--data.num_folds", str(NUM_FOLDS), "--data.fold", "2")
    alone, fold = tmp_path / "fit/version_0", fold_runs(finished, NUM_FOLDS)[1]
    assert rows_of(alone / "test_predictions.csv") == rows_of(fold / "test_predictions.csv")
    weights, other = weights_of(alone), weights_of(fold)
    assert all(torch.equal(weights[name], other[name]) for name in weights)
    # the control: another fold has other weights
    third = weights_of(fold_runs(finished, NUM_FOLDS)[2])
    assert not all(torch.equal(weights[name], third[name]) for name in weights)


def test_the_joined_checkpoint_gives_the_mean_of_the_folds(images, finished):
    pictures = [decode(str(path)) for path in sorted(images.rglob("*.png"))[::5]]
    joined = Predictor(finished / "checkpoints/best.ckpt")
    folds = [Predictor(run / "checkpoints/best.ckpt") for run in fold_runs(finished, NUM_FOLDS)]
    expected = np.mean([fold(pictures) for fold in folds], axis=0)
    np.testing.assert_allclose(joined(pictures), expected, atol=2e-6)  # float32
    # the control: without the temperatures of the folds
    for fold in folds:
        assert fold.calibration.temperature != 1
        fold.calibration = fold.calibration._replace(temperature=1.0)
    assert np.abs(np.mean([fold(pictures) for fold in folds], axis=0) - expected).max() > 1e-3


def test_the_folder_is_a_run_for_other_commands(cli, images, finished, capsys):
    cli("predict", finished, images, "--workers", 0)
    assert "36 images" in capsys.readouterr().out
    assert len(rows_of(Path("runs/predict/version_0/predictions.csv"))) == 36
    cli("export", finished, "--format", "safetensors", "--out", "all.safetensors")
    assert Path("all.safetensors").stat().st_size > 3 * 4 * 290_000  # three networks in float32
    with pytest.raises(ValueError, match="has seen .* in training"):
        cli("test", finished, images, "--workers", 0)


def test_the_report_shows_the_folds_and_the_total(cli, finished, tmp_path, capsys):
    cli("report", finished, "--output", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    accuracy = f"{100 * result_of(finished)['test/accuracy']:.1f} %"
    assert f"<strong>{accuracy}</strong> test accuracy" in page
    (table,) = re.findall(r'aria-label="results of each fold">(.*?)</table>', page, re.DOTALL)
    assert table.count("<tr><td>") == NUM_FOLDS
    for row in result_of(finished)["folds"]:
        assert f"{100 * row['num_right'] / row['num_images']:.1f} %" in table
    assert "36, each tested in one of 3 folds" in page and "doubts" not in page
    row = read_row(finished)
    assert row.epochs == 1
    assert (row.state, row.num_images, row.split) == ("finished", 36, "test")


def test_resumed_after_a_failed_fold_it_ends_bit_for_bit_as_a_whole_one(
    images, finished, tmp_path, monkeypatch
):
    start = cross_validation.start_command

    def fails_at_the_second(command: list[str]) -> int:
        return 1 if "fold_2" in command else start(command)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(cross_validation, "start_command", fails_at_the_second)
        fit(images, tmp_path, "--folds", str(NUM_FOLDS))
    assert stopped.value.code == 1
    folder = tmp_path / "fit/version_0"
    assert read_row(folder).state == "unfinished"
    command_line.run(["fit", "--resume", str(folder)])
    release()
    assert (folder / "predictions.csv").read_bytes() == (finished / "predictions.csv").read_bytes()
    weights, whole = weights_of(folder), weights_of(finished)
    assert weights.keys() == whole.keys()
    assert all(torch.equal(weights[name], whole[name]) for name in weights)
    about = json.loads((folder / "about.json").read_text())
    assert "ended" in about and len(about["went_on_by"]) == 1


def test_a_first_fold_that_fails_leaves_no_folder(images, tmp_path, monkeypatch):
    monkeypatch.setattr(cross_validation, "start_command", lambda command: 2)
    with pytest.raises(SystemExit) as stopped:
        fit(images, tmp_path, "--folds", "2")
    assert stopped.value.code == 2 and list((tmp_path / "fit").iterdir()) == []


def test_a_fold_is_tested_on_the_test_folder_of_other_images(cli, finished, colours, tmp_path):
    """Not on a fold of their training images."""
    cli("test", fold_runs(finished, NUM_FOLDS)[0], colours, "--workers", 0)
    tested = rows_of(tmp_path / "runs/test/version_0/test_predictions.csv")
    assert sorted(row["path"] for row in tested) == sorted(
        map(str, (colours / "test").rglob("*.png"))
    )


def test_it_goes_on_from_another_folder(images, finished, tmp_path, monkeypatch):
    """Its paths are relative to the folder in which it began."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/data").symlink_to(images)
    monkeypatch.chdir(tmp_path / "a")
    start = cross_validation.start_command
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(
            cross_validation,
            "start_command",
            lambda command: 1 if "fold_2" in command else start(command),
        )
        fit(Path("data"), Path("runs"), "--folds", str(NUM_FOLDS))
    monkeypatch.chdir(tmp_path)
    command_line.run(["fit", "--resume", "a/runs/fit/version_0"])
    release()
    found = result_of(tmp_path / "a/runs/fit/version_0")
    assert found["confusion_matrix"] == result_of(finished)["confusion_matrix"]
    assert found["test/loss"] == result_of(finished)["test/loss"]


def test_an_ended_one_runs_nothing_again_and_can_be_prolonged(
    images, tmp_path, in_this_process, capsys
):
    fit(images, tmp_path, "--folds", "2")
    folder = tmp_path / "fit/version_0"
    before = (folder / "predictions.csv").read_bytes()
    in_this_process.clear()
    command_line.run(["fit", str(images), "--folds", "2", "--resume", "--out", str(tmp_path)])
    release()
    assert in_this_process == [] and (folder / "predictions.csv").read_bytes() == before
    command_line.run(["fit", "--resume", str(folder), "--epochs", "2"])
    release()
    assert len(in_this_process) == 2 and (folder / "predictions.csv").read_bytes() != before
    # neither is a run that a fit without folds goes on in
    capsys.readouterr()
    fit(images, tmp_path, "--resume")
    assert (tmp_path / "fit/version_1/checkpoints/last.ckpt").exists()


def test_a_test_folder_is_left_to_all_folds_together(colours, tmp_path):
    fit(colours, tmp_path, "--folds", "2")
    folder = tmp_path / "fit/version_0"
    paths = [row["path"] for row in rows_of(folder / "predictions.csv")]
    assert sorted(paths) == sorted(map(str, (colours / "train").rglob("*.png")))
    result = result_of(folder)
    assert np.sum(result["test_folder"]["confusion_matrix"]) == 30
    tested = rows_of(folder / result["test_folder"]["run"] / "test_predictions.csv")
    assert sorted(row["path"] for row in tested) == sorted(
        map(str, (colours / "test").rglob("*.png"))
    )


def test_the_folds_have_the_settings_of_the_first(finished, in_this_process):
    config = (finished / "config.yaml").read_text()
    assert "    fold: null\n" in config and "    num_folds: null\n" in config
    assert f"  default_root_dir: {json.dumps(str(finished.parents[1]))}\n" in config
    settings = [
        re.sub(r"fold_\d|fold: \d", "", (run / "config.yaml").read_text())
        for run in fold_runs(finished, NUM_FOLDS)
    ]
    assert len(set(settings)) == 1


def commands_of(folder: Path, *changes: tuple[str, str | None]) -> list[list[str] | None]:
    record = FoldRecord(3, [("data.root", "d"), ("trainer.max_epochs", "2")], "/")
    return [cross_validation._fold_command(folder, record, fold, [*changes]) for fold in (1, 2, 3)]


def test_the_command_of_a_fold_depends_on_how_far_it_is(tmp_path):
    own = ["--trainer.default_root_dir", str(tmp_path), "--name"]
    first, second, _ = commands_of(tmp_path)
    numbers = ["--data.num_folds", "3", "--data.fold"]
    flags = ["--data.root", "d", "--trainer.max_epochs", "2"]
    assert first == ["fit", *flags, *own, "fold_1", *numbers, "1"]
    assert second == [
        "fit",
        "--config",
        str(tmp_path / "config.yaml"),
        *own,
        "fold_2",
        *numbers,
        "2",
    ]
    changed = commands_of(tmp_path, ("trainer.max_epochs", "5"))[0]
    assert changed[1:5] == ["--data.root", "d", "--trainer.max_epochs", "5"]
    runs = fold_runs(tmp_path, 3)
    for run in runs[:2]:
        (run / "checkpoints").mkdir(parents=True)
        (run / "checkpoints/last.ckpt").touch()
    (runs[0] / "about.json").write_text('{"ended": "now"}')
    (runs[0] / "test.json").write_text("{}")
    assert commands_of(tmp_path)[:2] == [None, ["fit", f"--resume={runs[1]}"]]
    more = ("trainer.max_epochs", "5")
    assert commands_of(tmp_path, more)[0] == [
        "fit",
        "--trainer.max_epochs",
        "5",
        f"--resume={runs[0]}",
    ]
    (runs[0] / "checkpoints/last.ckpt").unlink()  # by --keep_last false
    assert commands_of(tmp_path, more)[0] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--folds", "1"], "--folds must be from 2 to 32, got 1"),
        (["--folds", "x"], "--folds"),
        (["--folds", "5", "--data.fold", "1"], "runs all folds"),
        (["--folds", "5", "--threshold", "f1"], "predictions.csv"),
        (["--folds", "5", "--minutes", "5"], "give --epochs"),
        (["--folds", "5", "--data.test_fraction", "0.3"], "tested once"),
        (["--folds", "5", "--ckpt_path", __file__], "give --weights"),
        (["--folds", "20", "--members", "2"], "more than 32 networks"),
        (["--folds", "5", "--trainer.fast_dev_run", "true"], "tests nothing"),
    ],
)
def test_what_does_not_go_with_folds_is_refused(images, tmp_path, arguments, message):
    with pytest.raises(WrongUsage, match=message):
        fit(images, tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_folds_of_a_config_or_a_launcher_are_refused(images, tmp_path, monkeypatch):
    (tmp_path / "folds.yaml").write_text("folds: 5\n")
    with pytest.raises(WrongUsage, match="give it on the command line"):
        fit(images, tmp_path, "--config", str(tmp_path / "folds.yaml"))
    monkeypatch.setattr(cross_validation, "has_launcher", lambda: True)
    with pytest.raises(WrongUsage, match="with torchrun or srun, run each fold by"):
        fit(images, tmp_path, "--folds", "5")


def test_another_number_of_folds_does_not_go_on(finished):
    with pytest.raises(WrongUsage, match="has 3 folds, not 5"):
        command_line.run(["fit", "--resume", str(finished), "--folds", "5"])
    release()


def test_the_record_is_read_back_and_a_damaged_one_is_named(tmp_path):
    record = FoldRecord(5, [("data.root", "ä"), ("resume", None)], "/x")
    write_folds(tmp_path, record)
    assert read_folds(tmp_path) == record
    for content in (
        "{",
        "[]",
        '{"num_folds": 5}',
        '{"num_folds": "5", "flags": [], "working_dir": ""}',
    ):
        (tmp_path / "folds.json").write_text(content)
        with pytest.raises(ValueError, match="folds.json is damaged"):
            read_folds(tmp_path)


def test_an_ensemble_may_have_as_many_members_as_there_may_be_folds():
    assert MAX_FOLDS == MAX_MEMBERS
