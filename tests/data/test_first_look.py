"""What a fit reports about its files before it reads them."""

import json
import os
import shutil
from dataclasses import replace

import pytest

from finetune import ImageFolderData
from finetune.data.checking.first_look import first_look


@pytest.fixture
def folder(colours, tmp_path):
    return shutil.copytree(colours, tmp_path / "colours")


def look(folder):
    data = ImageFolderData(str(folder), on_bad_image="skip")
    return first_look(data.splits, data.class_names, str(folder))


def reported(folder):
    return look(folder).line()


def test_a_sound_set_gets_no_line(folder):
    first, second = sorted((folder / "train").glob("*/*"))[:2]
    shutil.copy(first, second)  # in one split, which spoils no test
    assert reported(folder) == "" and look(folder).plain() == {
        "num_files": 90,
        "num_opened": 90,
        "findings": [],
    }


def test_copies_across_splits_and_what_is_no_image(folder):
    train, test = (sorted((folder / split).glob("*/*")) for split in ("train", "test"))
    shutil.copy(train[0], test[3])
    for path, content in ((train[-1], b""), (train[-2], b"<html>"), (test[-1], b"<html>")):
        path.write_bytes(content)
    text = reported(folder)
    assert "2 are in two splits" in text and str(test[3]) in text
    assert "3 cannot be read" in text and f"finetune check {folder}" in text
    assert len(text.splitlines()) == 1


def test_names_that_are_not_text_are_reported_as_such(folder):
    name = os.fsdecode(b"caf\xe9\n.png")
    (folder / "train/blue" / name).write_bytes(b"broken")
    assert "train/blue/caf\\udce9\\n.png" in reported(folder)


def test_what_is_kept_is_the_worst_first_with_some_names(folder):
    train, test = (sorted((folder / split).glob("*/*")) for split in ("train", "test"))
    shutil.copy(train[0], test[3])
    for path in train[1:15]:
        path.write_bytes(b"<html>" if path != train[1] else b"")
    kept = look(folder).plain()
    assert kept["num_files"] == kept["num_opened"] == 90
    assert [(f["kind"], f["level"]) for f in kept["findings"]] == [
        ("leak_exact", "bad"),
        ("unreadable", "bad"),
    ]
    leak, broken = kept["findings"]
    assert sorted(leak["rows"][0]["files"]) == sorted(
        str(p.relative_to(folder)) for p in (train[0], test[3])
    )
    assert broken["title"] == "14 images cannot be read" and len(broken["rows"]) == 5
    assert broken["rows"][0]["note"] == "the file is empty"
    json.dumps(kept)


def test_classes_are_looked_at_even_of_what_are_no_files(folder):
    for path in sorted((folder / "train/blue").iterdir())[3:]:
        path.unlink()
    splits = ImageFolderData(str(folder)).splits
    gone = {
        name: replace(split, paths=[f"{name}/{i}" for i in range(len(split))], stats=None)
        for name, split in splits.items()
    }
    found = first_look(gone, ["blue", "green", "red"], str(folder)).plain()
    assert found["num_files"] == found["num_opened"] == 0
    assert [f["kind"] for f in found["findings"]] == ["tiny_class", "unequal_classes"]
    assert "blue: " in found["findings"][0]["rows"][0]["note"]
