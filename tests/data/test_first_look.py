"""What a fit says of its files before it reads them."""

import os
import shutil

import pytest

from finetune import ImageFolderData
from finetune.data.checking.first_look import first_look


@pytest.fixture
def folder(colours, tmp_path):
    return shutil.copytree(colours, tmp_path / "colours")


def told(folder):
    return first_look(ImageFolderData(str(folder), on_bad_image="skip").splits, str(folder))


def test_a_sound_set_gets_no_line(folder):
    first, second = sorted((folder / "train").glob("*/*"))[:2]
    shutil.copy(first, second)  # in one split, which spoils no test
    assert told(folder) == ""


def test_copies_across_splits_and_what_is_no_picture(folder):
    train, test = (sorted((folder / split).glob("*/*")) for split in ("train", "test"))
    shutil.copy(train[0], test[3])
    for path, content in ((train[-1], b""), (train[-2], b"<html>"), (test[-1], b"<html>")):
        path.write_bytes(content)
    text = told(folder)
    assert "2 lie in two splits alike" in text and str(test[3]) in text
    assert "3 can't be read" in text and f"finetune check {folder}" in text
    assert len(text.splitlines()) == 1


def test_names_that_are_not_text_are_told_as_such(folder):
    name = os.fsdecode(b"caf\xe9\n.png")
    (folder / "train/blue" / name).write_bytes(b"broken")
    assert "train/blue/caf\\udce9\\n.png for one" in told(folder)
