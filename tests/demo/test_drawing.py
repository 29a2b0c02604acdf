"""The generated images are reproducible and distinct, and their folder appears complete or not at all."""

import csv
import itertools
import os
from pathlib import Path

import cv2
import numpy as np
import pytest

from finetune.demo import drawing

CLASSES = drawing.SOURCE_CLASSES + drawing.TARGET_CLASSES
COUNTS = {"train": 3, "val": 1, "test": 2}


@pytest.mark.parametrize("class_name", CLASSES)
def test_an_image_depends_on_class_and_seed_alone(class_name):
    image = drawing.draw(class_name, (0, 0, 1))
    np.random.seed(3)  # must not matter
    assert image.shape == (96, 96, 3)
    assert image.dtype == np.uint8
    np.testing.assert_array_equal(image, drawing.draw(class_name, (0, 0, 1)))
    for seed in ((1, 0, 1), (0, 1, 1), (0, 0, 2)):
        assert np.abs(image.astype(float) - drawing.draw(class_name, seed)).mean() > 5


def test_several_dishes_depend_on_names_and_seed_and_each_is_drawn(monkeypatch):
    names = ("pizza", "donut", "fried_egg")
    image = drawing.draw_several(names, (0, 0, 1)).astype(float)
    assert image.shape == (96, 96, 3)
    np.testing.assert_array_equal(image, drawing.draw_several(names, (0, 0, 1)))
    assert np.abs(image - drawing.draw_several(names, (0, 0, 2))).mean() > 5
    assert drawing.draw_several((), (0,), size=48).shape == (48, 48, 3)
    # without the light of the photograph: one dish more changes the table where it stands, and nowhere else
    monkeypatch.setattr(drawing, "_photograph", lambda c, *_: c.image.copy())
    parts = [drawing.draw_several(names[:num], (0, 0, 1)) for num in range(4)]
    for fewer, more in itertools.pairwise(parts):
        is_changed = np.abs(more - fewer).mean(axis=2) > 5
        assert 0.02 < is_changed.mean() < 0.3


def test_the_table_of_several_dishes_names_each_image_once(tmp_path):
    folder = drawing.write_sample(tmp_path, "several", counts={"train": 30, "test": 10})
    with open(folder / drawing.TABLE, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["path"] for row in rows] == [
        *(f"train/{i:04d}.png" for i in range(30)),
        *(f"test/{i:04d}.png" for i in range(10)),
    ]
    assert all(row["path"].startswith(row["split"]) for row in rows)
    labels = [row["labels"].split(";") if row["labels"] else [] for row in rows]
    assert {len(own) for own in labels} == {0, 1, 2, 3}
    assert {name for own in labels for name in own} == {*drawing.SOURCE_CLASSES}
    assert all(own == sorted(set(own)) for own in labels)
    assert len({(folder / row["path"]).read_bytes() for row in rows}) == len(rows)
    # a row's labels are those that its image was drawn with
    i = next(i for i, own in enumerate(labels) if len(own) == 2)
    stored = cv2.imread(str(folder / rows[i]["path"]))[..., ::-1]
    drawn = [drawing.draw_several(order, (0, 0, i)) for order in (labels[i], labels[i][::-1])]
    assert any(np.array_equal(stored, image) for image in drawn)
    others = drawing.draw_several(labels[i][:1], (0, 0, i))
    assert not np.array_equal(stored, others)


def test_another_size_shows_the_same_kind_of_image():
    assert drawing.draw("pizza", (0,), size=48).shape == (48, 48, 3)


@pytest.mark.parametrize("class_name", CLASSES)
def test_no_image_is_blank(class_name):
    images = np.stack([drawing.draw(class_name, (7, i)) for i in range(12)]).astype(float)
    assert images.std((1, 2, 3)).min() > 8  # grey levels; noise alone gives at most 7
    assert 60 < images.mean() < 190


@pytest.mark.slow
def test_the_drawing_is_the_one_that_was_calibrated():
    # Mean colour of the middle of 16 images, coarse enough for another version of OpenCV or NumPy to agree.
    expected = {
        "burger": (154, 115, 65),
        "fried_egg": (207, 189, 135),
        "pizza": (191, 121, 54),
        "hotdog": (164, 110, 74),
    }
    for class_name, colour in expected.items():
        middle = np.mean(
            [drawing.draw(class_name, (9, i))[32:64, 32:64] for i in range(16)], (0, 1, 2)
        )
        np.testing.assert_allclose(middle, colour, atol=3)


def test_each_name_draws_its_own_thing():
    # On the same empty table with the same random numbers; a misspelt name would leave the table empty.
    names = {
        *drawing.SOURCE_CLASSES,
        *drawing.NEGATIVES,
        *drawing.CLUTTER,
        "hotdog",
        "plate",
        "nothing",
    }
    images = {}
    for name in names:
        rng = np.random.default_rng(0)
        images[name] = np.full((96, 96, 3), 128, np.float32)
        canvas = drawing.Canvas(
            rng, images[name], np.zeros((96, 96), np.float32), 0.0, np.eye(2, 3)
        )
        canvas.place(0.5, 0.5, 0.4, 0.0)
        drawing.draw_thing(canvas, name)
    assert (images["nothing"] == 128).all()
    for first, second in itertools.combinations(names, 2):
        assert np.abs(images[first] - images[second]).mean() > 0.5, (first, second)


@pytest.mark.slow
def test_a_hot_dog_is_a_bun_and_a_sausage():
    assert "hotdog" not in drawing.NEGATIVES + drawing.SOURCE_CLASSES
    names = ("salad_bowl", "sandwich", "hotdog")
    middle = {
        c: np.mean([drawing.draw(c, (9, i))[40:56, 40:56] for i in range(16)], (0, 1, 2))
        for c in names
    }
    redness = {c: colour[0] - colour[1] for c, colour in middle.items()}
    # the sausage is what is red
    assert redness["salad_bowl"] + 15 < redness["sandwich"] < redness["hotdog"]


@pytest.mark.parametrize(
    ("task", "classes"),
    [("source", drawing.SOURCE_CLASSES), ("target", drawing.TARGET_CLASSES)],
)
def test_layout_counts_and_no_image_twice(tmp_path, task, classes):
    folder = drawing.write_sample(tmp_path / "data", task, counts=COUNTS)
    assert folder == tmp_path / "data" / task
    expected = {
        f"{s}/{c}/{i:04d}.png" for s, count in COUNTS.items() for c in classes for i in range(count)
    }
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.png")}
    assert set(files) == expected
    # none of train in test
    assert len({path.read_bytes() for path in files.values()}) == len(files)
    assert os.listdir(folder.parent) == [task]
    stored = cv2.imread(str(folder / "train" / classes[0] / "0002.png"))[..., ::-1]
    np.testing.assert_array_equal(stored, drawing.draw(classes[0], (0, 0, 2)))


def test_a_split_does_not_depend_on_the_other_splits(tmp_path):
    full = (
        drawing.write_sample(tmp_path / "whole", "target", counts=COUNTS) / "test/hotdog/0000.png"
    )
    alone = (
        drawing.write_sample(tmp_path / "alone", "target", counts={"test": 1})
        / "test/hotdog/0000.png"
    )
    other = (
        drawing.write_sample(tmp_path / "other", "target", seed=1, counts={"test": 1})
        / "test/hotdog/0000.png"
    )
    assert full.read_bytes() == alone.read_bytes() != other.read_bytes()


def test_an_existing_folder_is_left_as_it_is(tmp_path, monkeypatch):
    folder = drawing.write_sample(tmp_path, "target", counts={"val": 1})
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    monkeypatch.setattr(drawing, "draw", None)  # drawing again would fail
    assert drawing.write_sample(tmp_path, "target", counts=COUNTS) == folder
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_write_leaves_nothing_behind(tmp_path, monkeypatch, error):
    write_bytes = Path.write_bytes

    def fail_at_third(path, data):
        if path.name == "0002.png":
            raise error
        return write_bytes(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fail_at_third)
        with pytest.raises(type(error)):
            drawing.write_sample(tmp_path, "target", counts=COUNTS)
    assert not list(tmp_path.iterdir())
    assert drawing.write_sample(tmp_path, "target", counts=COUNTS).is_dir()
