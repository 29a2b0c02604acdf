"""The checks of single files, folders and classes."""

import numpy as np
import pytest
from drawings import drawing, facts_of
from PIL import Image

from finetune.data.checking.checks import class_findings, file_findings, folder_findings
from finetune.data.checking.image_facts import collect_facts, inspect_images
from finetune.data.datasets.listing import list_images


def rows(findings):
    return {finding.kind: [row.note for row in finding.rows] for finding in findings}


@pytest.fixture
def folder(tmp_path):
    """Makes a data set with a number of empty image files for each split and class."""

    def make(**splits):
        for split, classes in splits.items():
            for name, num in classes.items():
                (tmp_path / split / name).mkdir(parents=True)
                for i in range(num):
                    (tmp_path / split / name / f"{i}.jpg").touch()
        return list_images(tmp_path)

    return make


def test_classes_that_are_even_are_not_named(folder):
    classes = {"a": 12, "b": 14}
    assert rows(class_findings(folder(train=classes, test=classes))) == {}


def test_each_doubtful_class_is_named(folder):
    train = {"Hot Dog": 60, "hot_dog": 12, "few": 3, "empty": 0, "lone": 20}
    found = rows(
        class_findings(folder(train=train, test={**train, "lone2": 1} | {"lone": 2, "empty": 2}))
    )
    assert found["alike_names"] == ["'Hot Dog' and 'hot_dog'"]
    assert found["empty_class"] == ["empty in train"]
    assert found["one_split"] == ["lone2 is in test alone"]
    assert found["tiny_class"] == ["few: 3 images"]
    assert found["unequal_classes"][0] == "Hot Dog: 60" and len(found) == 5


def test_a_name_that_fit_refuses_is_named(folder):
    found = rows(class_findings(folder(train={"new\nline": 12, "größe": 12})))
    assert found == {
        "odd_name": [r"b'new\nline' has a line break or control character in its name"]
    }


def test_one_composition_in_each_split_is_one_class(folder):
    assert (
        rows(
            class_findings(
                folder(train={"café": 12, "tea": 12}, test={"cafe\u0301": 12, "tea": 12})
            )
        )
        == {}
    )


def test_what_training_lacks_is_named_once(folder):
    found = rows(
        class_findings(
            folder(train={"a": 12, "b": 12}, val={"c": 1}, test={"a": 1, "b": 1, "c": 1})
        )
    )
    assert found["one_split"] == ["c is not in train"]


def test_scripts_that_differ_are_other_names(folder):
    assert rows(class_findings(folder(train={"犬": 12, "猫": 12, "+": 12, "-": 12}))) == {}


def test_what_is_not_read_is_named(folder, tmp_path):
    listing = folder(train={"a": 1})
    (tmp_path / "train/b").mkdir()
    for name in (
        "train/loose.jpg",
        "train/a/x.psd",
        "train/a/y.psd",
        "train/a/z.SVG",
        "train/a/noted.txt",
    ):
        (tmp_path / name).touch()
    (tmp_path / "train/gone").symlink_to("nowhere")
    found = rows(folder_findings(list_images(tmp_path)))
    assert found["loose"] == [f"1 image in {tmp_path / 'train'}"]
    assert found["other_files"] == ["2 files .psd", "1 file .svg"]
    assert found["unread"] == [f"{tmp_path / 'train/gone'}: a dangling link"]
    assert rows(folder_findings(listing)) == {}


def test_files_are_named_for_what_they_are_and_sound_ones_never(tmp_path):
    (tmp_path / "a").mkdir()
    images = [drawing(seed) for seed in range(9)]
    for i, image in enumerate(images):
        image.save(tmp_path / f"a/{i}.jpg")
    listing = list_images(tmp_path)
    assert rows(file_findings(listing, collect_facts(inspect_images(listing.paths), 9))) == {}
    images[1].convert("CMYK").save(tmp_path / "a/1.jpg")
    images[2].resize((40, 30)).save(tmp_path / "a/2.jpg")
    images[3].resize((500, 200)).save(tmp_path / "a/3.jpg")
    images[4].resize((200, 800)).save(tmp_path / "a/4.jpg")
    Image.new("RGB", (300, 220), "black").save(tmp_path / "a/5.jpg")
    (tmp_path / "a/6.jpg").write_bytes(b"")
    found = rows(file_findings(listing, collect_facts(inspect_images(listing.paths), 9)))
    assert found == {
        "unreadable": ["the file is empty"],
        "blank": ["mean brightness 0 of 255"],
        # the worst first
        "wide_or_tall": ["200 x 800: 75 % is cropped", "500 x 200: 60 % is cropped"],
        "odd_mode": ["CMYK"],
        "small": ["40 x 30 pixels"],
    }
    titles = {
        one.kind: one.title
        for one in file_findings(listing, collect_facts(inspect_images(listing.paths), 9))
    }
    assert titles["wide_or_tall"] == "2 images are so wide or tall that half of them is cropped"


def test_what_most_files_are_is_not_odd(folder):
    listing = folder(train={"a": 4})
    grey = np.random.default_rng(0).integers(0, 256, (4, 48, 48)).astype(np.uint8)
    assert rows(file_findings(listing, facts_of(grey, modes=["RGBA"] * 3 + ["L"]))) == {}
    assert (
        rows(file_findings(listing, facts_of(grey, modes=["RGBA"] * 2 + ["L"] * 2)))["odd_mode"]
        == ["RGBA"] * 2
    )
    # all as small: no thumbnails
    assert rows(file_findings(listing, facts_of(grey, sizes=np.full((4, 2), 28)))) == {}
