"""A fit on a table of images is the fit on the same images in class folders, and every command takes tables."""

import csv
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from colours import QUICKEST, draw_colours
from labelled_files import draw_labelled
from processes import finetune
from promise import control, promise

from finetune.cli import run
from finetune.commands.lightning_cli import run_lightning
from finetune.runs import run_lock

# 24 images in a class folder each, so that the table needs no splits
NUM = 24


def write_table(path: Path, folder: Path, shuffle: bool = True) -> Path:
    """List the images of class folders, in an order of chance, by paths relative to the table."""
    images = sorted(folder.rglob("*.png"))
    rows = [(os.path.relpath(image, path.parent), image.parent.name) for image in images]
    if shuffle:
        random.Random(0).shuffle(rows)
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("file_name", "species"), *rows])
    return path


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def state(run: Path) -> dict:
    return torch.load(run / "checkpoints/last.ckpt", weights_only=True)


def differences(a: Path, b: Path) -> list[str]:
    """Return what differs between two runs: weights, optimizer, the record of the images, metrics."""
    one, other = state(a), state(b)
    found = [
        name
        for name, value in one["state_dict"].items()
        if not value.equal(other["state_dict"][name])
    ]
    moments = [
        [value["exp_avg"] for value in known["optimizer_states"][0]["state"].values()]
        for known in (one, other)
    ]
    if not all(x.equal(y) for x, y in zip(*moments, strict=True)):
        found.append("optimizer")
    if one["finetune"]["data_fingerprint"] != other["finetune"]["data_fingerprint"]:
        found.append("fingerprint")
    seen = [known["finetune"]["seen"] for known in (one, other)]
    found += [
        name for name in ("names", "sizes", "digests") if not seen[0][name].equal(seen[1][name])
    ]
    if one["finetune"]["seen"]["num_train"] != other["finetune"]["seen"]["num_train"]:
        found.append("num_train")
    metrics = [json.loads((run / "test.json").read_text())["test/loss"] for run in (a, b)]
    return found + ["test"] * (metrics[0] != metrics[1])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with class folders and a table of their images, and a run of each."""
    parent = tmp_path_factory.mktemp("tables")
    place = (draw_colours(parent / "drawn", train=NUM) / "train").rename(parent / "images")
    write_table(place / "labels.csv", place)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        run_lightning(["fit", "--data.root", ".", *QUICKEST, "--name", "folders"])
        run_lock.release()
        run(["fit", "labels.csv", *QUICKEST, "--name", "table"])
        run_lock.release()
        yield place


@pytest.fixture
def here(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder, which is the working directory."""
    copied = shutil.copytree(place, tmp_path / "here")
    monkeypatch.chdir(copied)
    return copied


@promise("table")
def test_the_weights_of_a_table_are_those_of_its_folders(place):
    assert differences(place / "runs/fit/folders", place / "runs/fit/table") == []


def test_the_first_line_says_how_the_table_was_read(place):
    about = json.loads((place / "runs/fit/table/about.json").read_text())
    assert about["root"] == "labels.csv"
    assert about["lines"][0].startswith("images: labels.csv: train ")
    assert about["lines"][0].endswith(
        "path in column 'file_name', one label per image in column 'species'"
    )


@control("table")
def test_control_another_label_gives_other_weights(here):
    text = Path("labels.csv").read_text().splitlines()
    text[1] = text[1].replace("blue\n", "red\n").rpartition(",")[0] + (
        ",green" if not text[1].endswith("green") else ",red"
    )
    Path("other.csv").write_text("\n".join(text))
    run(["fit", "other.csv", *QUICKEST, "--name", "other"])
    run_lock.release()
    assert "optimizer" in differences(here / "runs/fit/folders", here / "runs/fit/other")


@pytest.mark.slow
def test_a_run_on_a_table_is_resumed_and_one_on_its_folders_too(here):
    for name, data in ("folders", "."), ("table", "labels.csv"):
        run(["fit", data, *QUICKEST, "--resume", f"runs/fit/{name}", "--trainer.max_epochs", "2"])
        run_lock.release()
    assert state(here / "runs/fit/table")["epoch"] == 1
    assert differences(here / "runs/fit/folders", here / "runs/fit/table") == []


@pytest.mark.slow
def test_the_newest_run_of_a_table_is_found_by_it(here, capsys):
    write_table(here / "copy.tsv", here).write_text(
        (here / "labels.csv").read_text().replace(",", "\t")
    )
    for data in ("labels.csv", "copy.tsv"):
        run(["fit", data, "--resume", *QUICKEST, "--trainer.max_epochs", "1"])
        run_lock.release()
    assert sorted(path.name for path in Path("runs/fit").iterdir()) == ["folders", "table"]


@pytest.mark.slow
def test_a_checkpoint_is_tested_on_its_table_and_on_others(here, caplog):
    caplog.set_level("INFO")
    run(["test", "runs/fit/table"])
    expected = json.loads(Path("runs/fit/table/test.json").read_text())
    again = json.loads(Path("runs/test/version_0/test.json").read_text())
    assert again["test/loss"] == expected["test/loss"]
    # another table of other images, in another folder
    draw_colours(here / "more", new=4)
    for image in (here / "more").rglob("*.png"):
        image.write_bytes(image.read_bytes() + b"more")
    write_table(here / "more/all.csv", here / "more/new")
    run(["test", "runs/fit/table", "more/all.csv"])
    assert "12 test images of more/all.csv (all)" in caplog.text
    run(["test", "runs/fit/table", "more/new"])
    results = [json.loads(Path(f"runs/test/version_{i}/test.json").read_text()) for i in (1, 2)]
    assert results[0]["test/loss"] == results[1]["test/loss"]
    run(["validate", "runs/fit/table"])


@pytest.mark.slow
def test_training_images_are_left_out_of_another_table(here, caplog):
    """By their content: they have other names there."""
    trained = torch.load("runs/fit/table/checkpoints/best.ckpt", weights_only=True)
    assert trained["finetune"]["seen"]["num_train"] > 40
    (here / "flat").mkdir()
    rows = ["path,label"]
    for i, image in enumerate(sorted(here.glob("*/*.png"))):
        shutil.copy(image, here / f"flat/{i}.png")
        rows.append(f"{i}.png,{image.parent.name}")
    Path("flat/all.csv").write_text("\n".join(rows))
    run(["test", "runs/fit/table", "flat/all.csv"])
    num = len(read_rows(Path("runs/test/version_0/test_predictions.csv")))
    num_test = json.loads(Path("runs/fit/table/about.json").read_text())["splits"]["test"]
    assert num == sum(num_test["counts"].values())
    assert "copies of images that the checkpoint was trained on" in caplog.text
    # but not silently, where all of them are
    Path("flat/train.csv").write_text(
        "\n".join(["path,label", *(row for row in rows[1:] if _is_trained_on(row, trained, here))])
    )
    with pytest.raises(ValueError, match="has seen .* in training"):
        run(["test", "runs/fit/table", "flat/train.csv"])


def _is_trained_on(row: str, checkpoint: dict, here: Path) -> bool:
    import numpy as np

    from finetune.data.contents import file_digests

    path = str(here / "flat" / row.partition(",")[0])
    digest = file_digests([path], np.array([0])).view(np.int64)[0]
    return bool((checkpoint["finetune"]["seen"]["digests"] == int(digest)).any())


@pytest.mark.slow
def test_predictions_of_a_table_are_a_table_again(here):
    run(["predict", "runs/fit/table", "labels.csv"])
    written = Path("runs/predict/version_0/predictions.csv")
    rows = read_rows(written)
    listed = read_rows(Path("labels.csv"))
    assert [row["path"] for row in rows] == [row["file_name"] for row in listed]
    run(["predict", "runs/fit/table", str(written), "--output", "again.csv"])
    assert Path("again.csv").read_text() == written.read_text()
    test_rows = Path("runs/fit/table/test_predictions.csv")
    run(["test", "runs/fit/table", str(test_rows)])  # its column `label` is the true class
    expected = json.loads(Path("runs/fit/table/test.json").read_text())
    assert json.loads(Path("runs/test/version_0/test.json").read_text())[
        "test/loss"
    ] == pytest.approx(expected["test/loss"], abs=1e-6)


def test_a_table_is_checked(here, capsys):
    text = Path("labels.csv").read_text().splitlines()
    Path("faulty.csv").write_text("\n".join([*text, "nowhere.png,red"]))
    with pytest.raises(SystemExit) as stop:
        run(["check", "faulty.csv"])
    assert stop.value.code == 1
    out = capsys.readouterr().out
    assert f"faulty.csv: {3 * NUM} images in 3 classes" in out
    assert "1 fault in the rows of the table: faulty.csv, line 74, column file_name" in out
    content = json.loads(Path("check.json").read_text())
    assert content["root"] == str(here / "faulty.csv")
    run(["report", "runs/fit/table"])  # shows no findings of another table
    for arguments in (["check", "nowhere.csv"], ["check", "labels.csv", "--columns", "path:x"]):
        with pytest.raises((ValueError, SystemExit)) as caught:
            run(arguments)
        assert getattr(caught.value, "exit_code", 2) == 2


@pytest.mark.slow
def test_skipped_rows_are_listed(here):
    text = Path("labels.csv").read_text().splitlines()
    Path("faulty.csv").write_text("\n".join([*text, "nowhere.png,red", "red/00.png,"]))
    with pytest.raises(ValueError, match=r"faulty\.csv, line 74, column file_name"):
        run(["fit", "faulty.csv", *QUICKEST])
    run(["fit", "faulty.csv", *QUICKEST, "--name", "skipped", "--data.on_bad_image", "skip"])
    run_lock.release()
    assert Path("runs/fit/skipped/skipped.txt").read_text().splitlines() == [
        "faulty.csv, line 74, column file_name: nowhere.png does not exist",
        "faulty.csv, line 75, column species: the label is empty",
    ]
    # the rows that are left are those of the folders
    assert differences(here / "runs/fit/folders", here / "runs/fit/skipped") == []


@pytest.mark.slow
def test_a_table_of_several_labels_is_fitted_tested_and_checked(cli, tmp_path, capsys, caplog):
    caplog.set_level("INFO")
    draw_labelled(tmp_path / "drawn", train=60)
    rows = ["path,labels"]
    for image in sorted((tmp_path / "drawn/train").iterdir()):
        rows.append(f"drawn/train/{image.name},{';'.join(image.stem.split('+')[1:])}")
    Path("labels.csv").write_text("\n".join(rows))
    cli("fit", "labels.csv", *QUICKEST)
    assert "several labels per image, labels separated by ';' in column 'labels'" in caplog.text
    # a table without any separator is of several labels, too, where the checkpoint is
    Path("ones.csv").write_text("\n".join(row for row in rows if ";" not in row))
    assert len(read_rows(Path("ones.csv"))) > 20
    cli("test", "runs/fit/version_0")
    cli("test", "runs/fit/version_0", "ones.csv")
    for i in range(2):
        result = json.loads(Path(f"runs/test/version_{i}/test.json").read_text())
        assert any("mAP" in name for name in result)
    with pytest.raises(SystemExit):
        cli("check", "labels.csv")
    assert "60 images in 4 classes, several labels per image" in capsys.readouterr().out


@promise("table")
@pytest.mark.slow
def test_two_processes_train_on_a_table_as_on_its_folders(here):
    for name, data in ("folders2", "."), ("table2", "labels.csv"):
        finetune("fit", data, *QUICKEST, "--name", name, "--devices", "2", cwd=here)
    assert differences(here / "runs/fit/folders2", here / "runs/fit/table2") == []
