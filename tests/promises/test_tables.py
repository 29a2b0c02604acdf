"""Every command takes a table of images; test_places.py shows that a fit on one is that on its folders."""

import csv
import json
import shutil
from pathlib import Path

import pytest
from colours import QUICKEST, draw_colours
from labelled_files import draw_labelled
from places import write_table

from finetune.cli import run

slow = pytest.mark.slow


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def result(folder: str) -> dict[str, float]:
    return json.loads(Path(folder, "test.json").read_text())


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images in SPLIT/CLASS, a table of them, and a run on it; to be copied."""
    folder = tmp_path_factory.mktemp("tables") / "fitted"
    draw_colours(folder / "images", train=12, test=6)
    write_table(folder / "images/labels.csv", folder / "images")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(["fit", "images/labels.csv", *QUICKEST, "--name", "table"])
    return folder


@pytest.fixture
def here(fitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = shutil.copytree(fitted, tmp_path / "here")
    monkeypatch.chdir(copy)
    return copy


def test_a_fit_says_how_its_table_was_read(fitted):
    about = json.loads((fitted / "runs/fit/table/run.json").read_text())
    line = about["lines"][0]
    assert line.startswith("images: images/labels.csv: train ")
    assert (
        "path in column 'file_name'" in line and "one label per image in column 'species'" in line
    )


def test_predictions_of_a_table_are_a_table_again(here):
    run(["predict", "runs/fit/table", "images/labels.csv"])
    written = Path("runs/predict/version_0/predictions.csv")
    names = [row["file_name"] for row in read_rows(Path("images/labels.csv"))]
    assert [row["path"].removeprefix("images/") for row in read_rows(written)] == names
    run(["predict", "runs/fit/table", str(written), "--output", "again.csv"])
    assert Path("again.csv").read_text() == written.read_text()
    # its column `label` is the true class
    run(["test", "runs/fit/table", "runs/fit/table/test_predictions.csv"])
    found = result("runs/test/version_0")["test/loss"]
    assert found == pytest.approx(result("runs/fit/table")["test/loss"], abs=1e-6)


def test_check_lists_the_faulty_rows_of_a_table(here, capsys):
    with open("images/labels.csv", "a") as file:
        file.write("nowhere.png,red,train\n")
    with pytest.raises(SystemExit) as stop:
        run(["check", "images/labels.csv"])
    assert stop.value.code == 1
    out = capsys.readouterr().out
    assert "images/labels.csv: 54 images in 3 classes" in out
    assert "images/labels.csv, line 56, column file_name" in out


@slow
def test_on_bad_image_skip_lists_the_rows_and_trains_on_the_others(here):
    with open("images/labels.csv", "a") as file:
        file.write("nowhere.png,red,train\ntrain/red/00.png,,train\n")
    with pytest.raises(ValueError, match="line 56, column file_name"):
        run(["fit", "images/labels.csv", *QUICKEST])
    line = ["fit", "images/labels.csv", *QUICKEST, "--data.on_bad_image", "skip"]
    run([*line, "--name", "skipped"])
    skipped = Path("runs/fit/skipped/skipped.txt").read_text().splitlines()
    assert [line.partition(": ")[0] for line in skipped] == [
        "images/labels.csv, line 56, column file_name",
        "images/labels.csv, line 57, column species",
    ]
    assert result("runs/fit/skipped")["test/loss"] == result("runs/fit/table")["test/loss"]


@slow
def test_resume_finds_the_newest_run_on_a_table(here):
    shutil.copy("images/labels.csv", "images/copy.csv")
    run(["fit", "images/labels.csv", *QUICKEST, "--name", "own"])
    for table in ("labels.csv", "copy.csv"):
        run(["fit", f"images/{table}", *QUICKEST, "--resume"])
    assert {path.name for path in Path("runs/fit").iterdir()} == {"table", "own", "version_0"}


@slow
def test_training_images_are_left_out_of_the_test_on_another_table(here, caplog):
    """By their content: they have other names there."""
    caplog.set_level("INFO")
    Path("flat").mkdir()
    rows = {split: ["path,label"] for split in ("train", "all")}
    for i, image in enumerate(sorted(Path("images").glob("*/*/*.png"))):
        shutil.copy(image, f"flat/{i}.png")
        for split in ("all", image.parts[1]):
            rows.setdefault(split, []).append(f"{i}.png,{image.parent.name}")
    for split in ("train", "all"):
        Path(f"flat/{split}.csv").write_text("\n".join(rows[split]))
    run(["test", "runs/fit/table", "flat/all.csv"])
    assert len(read_rows(Path("runs/test/version_0/test_predictions.csv"))) == 18
    assert "which the checkpoint was trained on" in caplog.text
    # but not silently, where all of them are
    with pytest.raises(ValueError, match="has seen .* in training"):
        run(["test", "runs/fit/table", "flat/train.csv"])


@slow
def test_a_table_of_several_labels_is_fitted_tested_and_checked(cli, tmp_path, capsys, caplog):
    caplog.set_level("INFO")
    draw_labelled(tmp_path / "drawn", train=60)
    rows = ["path,labels"]
    for image in sorted((tmp_path / "drawn/train").iterdir()):
        rows.append(f"drawn/train/{image.name},{';'.join(image.stem.split('+')[1:])}")
    Path("labels.csv").write_text("\n".join(rows))
    cli("fit", "labels.csv", *QUICKEST)
    assert "labels separated by ';' in column 'labels'" in caplog.text
    # a table without any separator is of several labels, too, where the checkpoint is
    Path("ones.csv").write_text("\n".join(row for row in rows if ";" not in row))
    for number, table in enumerate(("labels.csv", "ones.csv")):
        cli("test", "runs/fit/version_0", table)
        assert any("mAP" in name for name in result(f"runs/test/version_{number}"))
    with pytest.raises(SystemExit):
        cli("check", "labels.csv")
    assert "60 images in 4 classes, several labels per image" in capsys.readouterr().out
