"""The names of images in a table are those of the same images in class folders, wherever the files are."""

import random

import pytest

from finetune.data.tables.canonical_names import name_starts


def names(rows, root):
    paths = [path for path, _ in rows]
    starts = name_starts(paths, [(label,) for _, label in rows], root)
    return [path[start:] for path, start in zip(paths, starts.tolist(), strict=True)]


TREE = [("cat/1.jpg", "cat"), ("cat/sub/2.jpg", "cat"), ("dog/1.jpg", "dog"), ("dog/cat/3.jpg", "dog")]  # fmt: skip


@pytest.mark.parametrize(
    ("base", "root"),
    [
        ("", ""),
        ("data/", "data"),
        ("data/deep/", "data"),
        ("/abs/data/", "/abs/data"),
        ("/abs/data/", "/elsewhere"),
        ("/cat/home/", "/elsewhere"),  # a folder above is called as a class is
        ("../up/", ""),
        ("dog/x/", ""),
    ],
)
def test_names_are_those_in_the_class_folders_wherever_they_lie(base, root):
    rows = [(base + path, label) for path, label in TREE]
    assert names(rows, root) == [path for path, _ in TREE]


def test_an_image_whose_label_was_corrected_keeps_its_name():
    rows = [(f"x/data/{path}", label) for path, label in TREE * 3]
    rows = [(path.replace(".jpg", f"{i}.jpg"), label) for i, (path, label) in enumerate(rows)]
    before = names(rows, "x")
    rows[0] = rows[0][0], "dog"
    assert names(rows, "x") == before


def test_images_without_class_folders_have_names_from_the_root():
    rows = [("data/images/1.jpg", "cat"), ("data/images/2.jpg", "dog"), ("/else/3.jpg", "dog")]
    assert names(rows, "data") == ["images/1.jpg", "images/2.jpg", "/else/3.jpg"]


def test_an_image_that_is_added_changes_no_other_name():
    rows = [(f"data/{path}", label) for path, label in TREE]
    before = names(rows, "data")
    for extra in (
        ("data/other/cat.jpg", "cat"),
        ("data/dog/new.jpg", "cat"),
        ("data/b/c/x.jpg", "c"),
    ):
        assert names([*rows, extra], "data")[:-1] == before


def test_two_images_never_share_a_name():
    rows = [(f"data/{part}/{path}", label) for part in ("a", "b") for path, label in TREE]
    assert names(rows, "data") == [path.removeprefix("data/") for path, _ in rows]


def test_the_order_of_rows_does_not_matter():
    rows = [(f"/h/{part}/{path}", label) for part in ("a", "b/cat") for path, label in TREE]
    expected = dict(zip(rows, names(rows, "/"), strict=True))
    random.Random(0).shuffle(rows)
    assert dict(zip(rows, names(rows, "/"), strict=True)) == expected
