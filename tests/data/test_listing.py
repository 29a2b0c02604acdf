"""The listing of a data set, compared with what a fit finds there, and the listing of one that a fit refuses."""

import numpy as np
import pytest

from finetune.data.datasets.folders import scan
from finetune.data.datasets.listing import list_images
from finetune.system.messages import WrongUsage

SOUND = {
    "splits": [
        "train/a/1.jpg",
        "train/b/2.png",
        "train/b/deep/er/3.webp",
        "test/a/1.jpg",
        "test/b/9.jpg",
        "val/a/1.jpg",
    ],
    "class folders alone": ["b/2.jpg", "a/1.jpg", "a/10.jpg", "a/2.JPG"],
    "other names of splits": [
        "training/x/1.jpg",
        "training/y/1.jpg",
        "validation/x/1.jpg",
        "testing/y/1.bmp",
    ],
    "hidden files": ["a/1.jpg", "a/.2.jpg", ".b/1.jpg", "b/1.jpg"],
    "decomposed Unicode": [
        *("train/cafe\u0301/1.jpg", "train/tea/1.jpg", "train/té/1.jpg"),
        *("val/café/1.jpg", "val/te\u0301/1.jpg"),
    ],
    "runs next to classes": [
        "a/1.jpg",
        "b/1.jpg",
        "runs/.finetune",
        "runs/test/version_0/1.webp",
    ],
}


def make(root, names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


@pytest.mark.parametrize("names", SOUND.values(), ids=SOUND)
def test_of_a_sound_set_it_is_what_a_fit_finds(tmp_path, names):
    make(tmp_path, names)
    listing = list_images(tmp_path)
    class_names, files = scan(tmp_path)
    assert listing.class_names == class_names and set(listing.splits) == set(files)
    for s, split in enumerate(listing.splits):
        of_split = np.flatnonzero(listing.split_of == s)
        assert [listing.paths[i] for i in of_split] == list(files[split].paths)
        assert listing.class_of[of_split].tolist() == list(files[split].targets.labels)
    assert listing.counts().sum() == len(listing.paths) == sum(len(f.paths) for f in files.values())


def test_what_a_fit_refuses_is_listed(tmp_path):
    make(tmp_path, ["train/a/1.jpg", "test/b/1.jpg", "train/loose.jpg"])
    (tmp_path / "train/c").mkdir()
    with pytest.raises(ValueError):
        scan(tmp_path)
    listing = list_images(tmp_path)
    assert listing.class_names == ["a", "b", "c"] and listing.counts().tolist() == [
        [1, 0, 0],
        [0, 1, 0],
    ]
    assert listing.folders.tolist() == [[True, False, True], [False, True, False]]
    assert [listing.name(i) for i in range(2)] == ["train/a/1.jpg", "test/b/1.jpg"]
    assert dict(listing.skipped.loose) == {str(tmp_path / "train"): 1}


def test_a_name_beneath_the_root_is_the_same_however_the_root_is_given(tmp_path, monkeypatch):
    make(tmp_path, ["a/a/1.jpg", "b/1.jpg"])
    monkeypatch.chdir(tmp_path)
    for root in (".", str(tmp_path), f"{tmp_path}/", "../" + tmp_path.name):
        listing = list_images(root)
        assert [listing.name(i) for i in range(2)] == ["a/a/1.jpg", "b/1.jpg"]


@pytest.mark.parametrize("content", [None, [], ["loose.jpg"]])
def test_what_is_no_data_set_is_reported_in_a_line(tmp_path, content):
    root = tmp_path / "set"
    if content is not None:
        root.mkdir()
        make(root, content)
    with pytest.raises(WrongUsage, match="does not exist|no class folders"):
        list_images(root)
