"""What a fit prints: an overview with its doubts, a line for each epoch or a bar on terminals, and augmented.webp."""

import io
import logging
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
from colours import QUICKEST, draw_colours
from PIL import Image
from rich.console import Console
from small_fits import data
from tiny_module import QUIET, Tiny, loader, trainer

from finetune import Classifier, ImageFolderData
from finetune.data.transforms import cropped_area, eval_transform
from finetune.training import progress_bar
from finetune.training.augmented_sheet import write_augmented
from finetune.training.overview import crop_line, data_warnings, log_overview
from finetune.training.progress_bar import ImageProgressBar

# Lightning speaks to torch of yesterday, advises more workers for twelve numbers, and doubts what is meant here.
pytestmark = QUIET


def bar(is_terminal: bool) -> tuple[ImageProgressBar, io.StringIO]:
    shown = ImageProgressBar()
    text = io.StringIO()
    shown.console = Console(file=text, force_terminal=is_terminal, width=120)
    return shown, text


def test_a_pipe_gets_a_line_for_each_epoch(tmp_path):
    shown, text = bar(is_terminal=False)
    options = {"check_val_every_n_epoch": 2, "max_epochs": 3}
    trainer(tmp_path, shown, **options).fit(Tiny(), loader(), loader())
    lines = text.getvalue().splitlines()
    assert len(lines) == 3
    for i, line in enumerate(lines):
        # an epoch without validation does not repeat that of another
        val = "  val/loss 0.2500  val/accuracy 0.7500" if i == 1 else ""
        assert line.startswith(f"epoch {i + 1}/3  train/loss {0.5 + i:.4f}{val}  "), line
        assert re.search(r"\d images/s", line)


def hides_and_shows(text: io.StringIO) -> bool:
    """Whether the cursor was hidden, and is there again."""
    return text.getvalue().count("\x1b[?25l") == text.getvalue().count("\x1b[?25h") > 0


def test_a_terminal_gets_a_bar_with_images_per_second_and_the_loss(tmp_path):
    shown, text = bar(is_terminal=True)
    train = trainer(tmp_path, shown)
    train.fit(Tiny(), loader(), loader())
    drawn = text.getvalue()
    assert "epoch 1/2" in drawn and "images/s" in drawn and "loss 0.1250" in drawn
    train.test(Tiny(), loader(), verbose=False)
    train.predict(Tiny(), loader())
    train.validate(Tiny(), loader(), verbose=False)
    assert all(what in text.getvalue() for what in ("testing", "predicting", "validating"))
    assert "validating" not in drawn and hides_and_shows(text)


class Broken(Tiny):
    def training_step(self, batch, batch_idx):
        raise KeyError("a mistake of ours")


def test_a_terminal_is_left_in_order_after_an_error(tmp_path):
    shown, text = bar(is_terminal=True)
    with pytest.raises(KeyError):
        trainer(tmp_path, shown).fit(Broken(), loader())
    assert hides_and_shows(text)


class Slow(Tiny):
    """A step takes 25 s of a clock, and long enough for the bar to be drawn."""

    def __init__(self, now: list[float], seconds: float) -> None:
        super().__init__()
        self.now = now
        self.seconds = seconds

    def training_step(self, batch, batch_idx):
        self.now[0] += 25
        time.sleep(self.seconds)
        return super().training_step(batch, batch_idx)


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The clock, which only the steps move."""
    now = [100.0]
    monkeypatch.setattr(progress_bar.time, "perf_counter", lambda: now[0])
    return now


def test_the_bar_and_the_lines_have_the_time_that_is_left_of_the_complete_fit(tmp_path, now):
    shown, text = bar(is_terminal=True)
    trainer(tmp_path, shown).fit(Slow(now, 0.15), loader())
    assert "2:05 left" in text.getvalue()  # two of three steps of 25 s, then an epoch
    shown, text = bar(is_terminal=False)
    trainer(tmp_path, shown).fit(Slow(now, 0), loader())
    first, last = text.getvalue().splitlines()
    assert "75 s left" in first and "left" not in last


def overview(caplog, images: ImageFolderData, model: Classifier | None = None, **options: Any):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    limited = pl.Trainer(accelerator="cpu", **quiet, **options)
    caplog.clear()
    with caplog.at_level(logging.INFO, "finetune"):
        log_overview(
            limited, model or Classifier(images.class_names, "small_cnn", weights=None), images
        )
    return [record.getMessage() for record in caplog.records]


def test_fit_says_what_is_trained_on_what_before_it_begins(colours, cli, caplog):
    cli("fit", "--data.root", colours, *QUICKEST, "--test_after_fit", "false")
    lines = [record.getMessage() for record in caplog.records if "overview" in record.name]
    train = data(colours).splits["train"].targets.counts()
    val = 60 - train.sum()
    of_images, of_network, of_training, few = lines
    for words in (f"train {train.sum()} (", f"val {val} (held out", "test 30 (", f"red {train[2]}"):
        assert words in of_images
    for words in ("small_cnn, random weights", "0.30 of 0.30 million", "AdamW at 0.001 (backbone)"):
        assert words in of_network
    assert "1 x cpu, precision 32-true, 4 batches of 16" in of_training
    assert f"val has only {val} images" in few and "--data.val_fraction" in few


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"freeze": "layer3", "freeze_batch_norm": True, "head_lr_multiplier": 10},
            ["up to layer3 and batch norm statistics", "0.0001 (backbone), 0.001 (head)"],
        ),
        ({"freeze": "backbone"}, ["everything except the head", "solved exactly"]),
    ],
)
def test_the_overview_says_what_is_frozen_and_the_rates(colours, caplog, options, words):
    model = Classifier(["blue", "green", "red"], "timm/test_resnet", None, **options)
    line = overview(caplog, data(colours), model)[1]
    assert all(word in line for word in words), line


def test_few_images_of_a_class_or_to_test_on_are_doubted(tmp_path):
    root = draw_colours(tmp_path / "few", train=3, test=10)
    assert list(data_warnings(data(root, val_fraction=0))) == []
    (root / "train/blue/00.png").unlink()
    (root / "test/red/00.png").unlink()
    classes, test = data_warnings(data(root, val_fraction=0))
    assert "blue 2." in classes and "--data.exclude" in classes
    assert "test has only 29 images" in test and "9 points" in test


def test_classes_that_validation_leaves_out_are_doubted(tmp_path):
    root = draw_colours(tmp_path / "few", train=12, test=10)
    for path in sorted((root / "train/green").iterdir())[1:]:
        path.unlink()
    lines = list(data_warnings(data(root)))
    assert len(lines) == 2 and "val has no images of green" in lines[1]


def test_groups_in_two_folders_or_of_many_images_are_doubted_and_folds_count_together(colours):
    line, share = data_warnings(data(colours, val_fraction=0.1, group_by=r"/(\d)"))
    assert "1 group of images is both in val and in test" in line
    assert "val has 50% of the images, not 10%" in share
    # fold 1 of 3 has 20 images to test, of 60
    assert list(data_warnings(data(colours, val_fraction=0, num_folds=3, fold=1))) == []


WIDE = (90, 30)
SQUARE = (40, 40)


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ([WIDE, SQUARE, SQUARE], {}, ["33% of 6", "median 23%"]),
        ([WIDE, SQUARE, SQUARE, SQUARE], {}, []),
        # plain photographs, as cameras have them
        ([(40, 30), (60, 40), (40, 60), (500, 333)], {}, []),
        ([WIDE], {"resize": "pad"}, []),
        ([WIDE], {"resize": "squash", "crop_share": 0.7}, ["median 51%"]),
    ],
)
def test_a_crop_that_cuts_much_away_is_reported(tmp_path, sizes, options, words):
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for i, size in enumerate(sizes):
            Image.new("RGB", size).save(tmp_path / "train" / name / f"{i}.png")
    images = data(tmp_path, val_fraction=0, **options)
    line = crop_line(images)
    assert bool(line) == bool(words) == ("--data.resize pad" in line)
    assert all(word in line for word in words)
    for path in (tmp_path / "train").rglob("*.png"):  # which does not stop it
        path.write_bytes(b"\x89PNG")
    assert crop_line(images) == ""


@pytest.mark.parametrize("resize", ["shorter_side", "squash", "whole", "pad"])
def test_the_share_that_is_cut_away_is_that_of_the_pipeline(resize):
    """Compared with the output of the evaluation pipeline on images whose pixels have the number of their column."""
    columns = np.tile(np.arange(240, dtype=np.uint8), (80, 1))
    seen = eval_transform(70, resize)(image=np.dstack([columns] * 3))["image"]
    width = (int(seen.max()) - int(seen.min()) + 1) / 240
    height = 1 if resize in ("whole", "pad") else 7 / 8
    assert 1 - width * height == pytest.approx(cropped_area(80, 240, resize, 7 / 8), abs=0.02)


def sheet(images: ImageFolderData, path: Path) -> np.ndarray:
    write_augmented(images, path)
    with Image.open(path) as opened:
        return np.asarray(opened).astype(int)


def test_augmented_images_are_shown_as_training_has_them(colours, tmp_path):
    """A row is an image: as evaluation prepares it, then as in each of five epochs."""
    plain = sheet(data(colours), tmp_path / "a.webp")
    assert plain.shape == (6 * 100 - 4, 6 * 100 - 4, 3)
    assert (plain == sheet(data(colours), tmp_path / "b.webp")).all()
    # A class is bright in one channel, in each of its images.
    places = [(y, x) for y in range(0, 600, 100) for x in range(0, 600, 100)]
    means = [plain[y : y + 96, x : x + 96].mean(axis=(0, 1)) for y, x in places]
    channels = np.array(means).argmax(axis=1).reshape(6, 6)
    assert (channels == channels[:, :1]).all()
    # Mixed, they are what they were as evaluation prepares them, but for what WebP makes of the neighbours; the noise
    # of another image, in a box of half the area on average, is some 15 levels off.
    off = np.abs(sheet(data(colours, cutmix=1.0), tmp_path / "c.webp") - plain).mean(axis=2)
    assert off[:, :96].mean() < 4 and off[:, 100:].mean() > 8
    few = data(colours)
    few.splits["train"] = few.splits["train"].take(np.arange(2))
    assert len(sheet(few, tmp_path / "d.webp")) == 2 * 100 - 4
