"""The contact sheet of predicted images."""

import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_fits import SMALL, data, fit

from finetune import Classifier
from finetune.commands.sheet import caption, draw_sheet, labels_text
from finetune.inference.predictor import Predictor
from finetune.system.messages import WrongUsage


@pytest.mark.parametrize(
    ("folder", "colour"),
    [("hotdog", (22, 128, 60)), ("not-hotdog", (190, 30, 45)), ("holiday", (70, 70, 70))],
)
def test_captions_are_coloured_by_what_the_folder_says(folder, colour):
    path = Path("test", folder, "1.png")
    assert caption(0.984, "hotdog", ["hotdog", "not-hotdog"], path) == ("hotdog 98 %", colour)


def test_a_folder_is_its_class_in_either_unicode_composition():
    green = caption(0.984, "hotdog", ["hotdog"], Path("test/hotdog/1.png"))[1]
    for folder, name in (
        ("café", "cafe\u0301"),
        ("cafe\u0301", "café"),
        ("cafe\u0301", "cafe\u0301"),
    ):
        assert caption(0.984, name, [name, "tea"], Path("test", folder, "1.png"))[1] == green


def test_images_stand_in_rows_in_their_order():
    images = np.stack([np.full((10, 10, 3), value, np.uint8) for value in (0, 60, 120, 180, 240)])
    paper = np.asarray(draw_sheet(images, [("x", (0, 0, 0))] * 5, columns=3, side=50, gap=10))
    assert paper.shape == (2 * (50 + 22 + 10) + 10, 3 * 60 + 10, 3)
    centres = [
        paper[10 + 25 + row * 82, 10 + 25 + column * 60, 0]
        for row in (0, 1)
        for column in (0, 1, 2)
    ]
    assert centres == [0, 60, 120, 180, 240, 255]


def test_captions_have_the_letters_of_other_languages():
    def drawn(text: str) -> bytes:
        return draw_sheet(
            np.zeros((1, 10, 10, 3), np.uint8), [(text, (0, 0, 0))], columns=1
        ).tobytes()

    # and not all the box for what a font lacks
    assert len({drawn(letter) for letter in "öøłжкшωλ"}) == 8


@pytest.fixture(scope="module")
def checkpoint(colours, tmp_path_factory) -> Path:
    """A checkpoint that takes three images at a time."""
    images, path = data(colours, batch_size=3), tmp_path_factory.mktemp("sheet") / "some.ckpt"
    fit(Classifier(images.class_names, **SMALL), images, limit_train_batches=1).save_checkpoint(
        path
    )
    return path


def test_sheet_from_the_command_line(colours, cli, tmp_path, capsys, checkpoint):
    shutil.copy(checkpoint, "some.ckpt")
    cli(
        "sheet",
        "--ckpt_path",
        "some.ckpt",
        "--pictures",
        colours / "test",
        "--num",
        5,
        "--columns",
        8,
    )
    with Image.open(tmp_path / "sheet.png") as paper:
        assert paper.size == (5 * 128 + 8, 120 + 22 + 16)
    assert capsys.readouterr().out == "sheet in sheet.png\n"


@pytest.mark.slow
def test_the_sheet_of_before_stays_until_the_new_one_is_whole(colours, cli, tmp_path, checkpoint):
    shutil.copy(checkpoint, "some.ckpt")
    (tmp_path / "sheet.png").write_bytes(b"before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))  # what a full disk does, without one
    try:
        with pytest.raises(OSError, match="File too large"):
            cli("sheet", "--ckpt_path", "some.ckpt", "--pictures", colours / "test")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "sheet.png").read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sheet.png", "some.ckpt"]
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    with pytest.raises(WrongUsage, match="a sheet is a .png"):  # before the checkpoint is read
        cli("sheet", "text.ckpt", colours / "test", "--output", "new")
    cli(
        "sheet",
        "some.ckpt",
        colours / "test/red",
        colours / "test/blue",
        "--output",
        "new/folder/a.PNG",
    )
    with Image.open(tmp_path / "new/folder/a.PNG") as paper:
        assert paper.format == "PNG"


def test_one_image_at_a_time_is_whole_in_memory(colours, cli, tmp_path, monkeypatch, checkpoint):
    parts = []
    classify = Predictor.classify
    monkeypatch.setattr(
        Predictor,
        "classify",
        lambda self, images: parts.append(len(images)) or classify(self, images),
    )
    cli("sheet", checkpoint, colours / "test", "--num", 5)
    assert parts == [3, 2]
    with Image.open(tmp_path / "sheet.png") as paper:
        assert paper.size == (5 * 128 + 8, 120 + 22 + 16)


def test_several_labels_have_a_probability_each():
    p = np.array([0.91, 0.2, 0.35])
    assert labels_text(["a", "b", "c"], p, p >= [0.5, 0.5, 0.3]) == "a 91 %, c 35 %"
    assert labels_text(["a", "b", "c"], p, p >= 1) == "no label"
