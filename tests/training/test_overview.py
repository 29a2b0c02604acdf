"""The overview that a fit prints before it trains."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
from colours import QUICKEST, draw_colours
from PIL import Image
from small_fits import SMALL, data, fit

from finetune import Classifier
from finetune.data.targets import ClassIndex
from finetune.data.transforms import cropped_area, eval_transform
from finetune.training import overview


def reported(caplog, images, model=None, **options) -> list[str]:
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **options,
    )
    caplog.clear()
    with caplog.at_level(logging.INFO, "finetune"):
        overview.log_overview(
            trainer, model or Classifier(images.class_names, "small_cnn", weights=None), images
        )
    return [record.getMessage() for record in caplog.records]


def few(num: int) -> str:
    return (
        f"val has only {num} images: the choice of the best epoch and the temperature are uncertain. "
        "Use a larger --data.val_fraction, or more images"
    )


def test_three_lines_before_training(colours, cli, caplog):
    cli("fit", "--data.root", colours, *QUICKEST, "--test_after_fit", "false")
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.name == "finetune.training.overview"
    ]
    train = data(colours).splits["train"].targets.counts()
    val = 60 - train.sum()
    assert lines == [
        f"images: {colours}: train {train.sum()} (its train folder), val {val} (held out of training, "
        "split_seed 0), test 30 (its test folder); 3 classes in train: "
        f"blue {train[0]}, green {train[1]}, red {train[2]}",
        "network: small_cnn, random weights; 0.30 of 0.30 million parameters are trained, frozen: nothing; "
        "AdamW at 0.001 (backbone), 0.001 (head)",
        "training: 1 x cpu, precision 32-true, 4 batches of 16 an epoch, max_epochs 1",
        few(val),
    ]


def test_where_the_splits_come_from(tmp_path, caplog):
    draw_colours(tmp_path / "drawn", train=10)
    images = data(tmp_path / "drawn/train", val_fraction=0)
    line, *_ = reported(caplog, images)
    test = len(images.splits["test"])
    assert (
        f"train {30 - test} (the remaining images), val none, test {test} (held out of training, "
        in line
    )


def test_what_is_frozen_and_the_rates(colours, caplog):
    images = data(colours)
    frozen = Classifier(
        images.class_names,
        "resnet18",
        None,
        freeze="layer3",
        freeze_batch_norm=True,
        head_lr_multiplier=10,
    )
    assert reported(caplog, images, frozen)[1] == (
        "network: resnet18, random weights; 8.40 of 11.18 million parameters are trained, "
        "frozen: the stages up to layer3 and batch norm statistics; AdamW at 0.0001 (backbone), 0.001 (head)"
    )
    head_alone = Classifier(images.class_names, "resnet18", None, freeze="backbone")
    assert (
        "; 1,539 of 11.18 million parameters are trained, frozen: everything except the head; "
        in reported(caplog, images, head_alone)[1]
    )
    decayed = Classifier(images.class_names, "resnet18", None, layer_decay=0.5)
    assert reported(caplog, images, decayed)[1].endswith(
        "AdamW at 3.13e-06 (conv1), 5e-05 (layer4), 0.0001 (head)"
    )


@pytest.mark.parametrize(
    ("limit", "expected"), [(1.0, "5 batches"), (2, "2 batches"), (0.5, "2 batches")]
)
def test_batches_an_epoch(colours, caplog, limit, expected):
    assert expected in reported(caplog, data(colours), limit_train_batches=limit, max_steps=7)[2]


def test_only_the_first_device_speaks(colours, caplog, monkeypatch):
    monkeypatch.setattr(pl.Trainer, "is_global_zero", False)
    assert reported(caplog, data(colours)) == []


def test_many_classes_are_not_listed(colours, caplog):
    images = data(colours)
    train = replace(
        images.splits["train"].take(np.arange(30)),
        targets=ClassIndex(np.arange(30) % 20, 20),
        origin="folder train",
    )
    names = [f"class {i}" for i in range(20)]
    images.scanned = replace(images.scanned, class_names=names, splits={"train": train})
    assert reported(caplog, images)[0].endswith("; 20 classes in train: 1 to 2 images each")
    caplog.clear()
    images.scanned.splits["train"] = train.take(np.arange(20))
    assert reported(caplog, images)[0].endswith("; 20 classes in train: 1 image each")


def test_doubts(tmp_path):
    """A class with two images, one held out; a class with one, which no other split has; a small test split."""
    root = draw_colours(tmp_path / "few", train=12, test=9)
    for name, left in (("blue", 2), ("green", 1)):
        for path in sorted((root / "train" / name).iterdir())[left:]:
            path.unlink()
    assert list(overview.data_warnings(data(root))) == [
        "too few training images: blue 1, green 1. Add images, or exclude these classes (--data.exclude)",
        "val has no images of green: its results do not measure them",
        "test has only 27 images: the standard error of an accuracy is up to 10 points",
    ]


def test_groups_in_two_given_folders_are_doubted_and_folds_count_together(colours):
    (line,) = overview.data_warnings(data(colours, val_fraction=0, group_by=r"/(\d)"))
    assert line.startswith("1 group of images is both in train and in test, such as")
    # fold 1 of 3 has 20 images to test, of 60
    fold = data(colours, val_fraction=0, num_folds=3, fold=1)
    assert list(overview.data_warnings(fold)) == []
    assert "held out of training, split_seed 0, fold 1 of 3" in overview._image_counts(fold)


def test_three_images_of_a_class_and_thirty_to_test_on_are_not_doubted_one_fewer_are(tmp_path):
    root = draw_colours(tmp_path / "few", train=3, test=10)
    assert list(overview.data_warnings(data(root, val_fraction=0))) == []
    (root / "train/blue/00.png").unlink()
    (root / "test/red/00.png").unlink()
    assert list(overview.data_warnings(data(root, val_fraction=0))) == [
        "too few training images: blue 2. Add images, or exclude these classes (--data.exclude)",
        "test has only 29 images: the standard error of an accuracy is up to 9 points",
    ]


@pytest.mark.parametrize(
    ("num", "limit", "expected"),
    [
        (49, 1.0, [few(49)]),
        (50, 1.0, []),
        (80, 4, [few(48)]),
        (80, 5, []),
        (11, 0, []),
        (0, 1.0, []),
    ],
)
def test_few_images_to_choose_an_epoch_by(colours, num, limit, expected):
    images = data(colours)
    split = images.splits.pop("val")
    if num:
        images.splits["val"] = split.take(np.zeros(num, int))
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, limit_val_batches=limit
    )
    model = SimpleNamespace(is_solved=False)
    assert list(overview.few_validation_images(trainer, model, images)) == expected
    solved = SimpleNamespace(is_solved=True)  # in one epoch
    of_temperature = [
        text.replace("the choice of the best epoch and the temperature are", "the temperature is")
        for text in expected
    ]
    assert list(overview.few_validation_images(trainer, solved, images)) == of_temperature


def cropped(root: Path, sizes: list[tuple[int, int]], **options) -> str:
    """The message about training images of these widths and heights."""
    for name in ("a", "b"):
        (root / "train" / name).mkdir(parents=True)
        for i, size in enumerate(sizes):
            Image.new("RGB", size).save(root / "train" / name / f"{i}.png")
    return overview.crop_line(data(root, val_fraction=0, **options))


WIDE = (90, 30)
TALL = (30, 90)
SQUARE = (40, 40)


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        (
            [WIDE, TALL, TALL],
            {},
            "100% of 6 sampled training images lose more than 50% of their area (median 74%)",
        ),
        (
            [WIDE, SQUARE, SQUARE],
            {},
            "33% of 6 sampled training images lose more than 50% of their area (median 23%)",
        ),
        ([WIDE, SQUARE, SQUARE, SQUARE], {}, ""),
        # plain photographs, as cameras have them
        ([(40, 30), (60, 40), (40, 60), (500, 333)], {}, ""),
        ([(64, 36)], {}, "lose more than 50% of their area (median 57%)"),
        ([(40, 30)], {"crop_share": 1.0}, ""),
        ([WIDE], {"resize": "whole"}, ""),
        ([WIDE], {"resize": "pad"}, ""),
        ([WIDE], {"resize": "squash"}, ""),
        ([WIDE], {"resize": "squash", "crop_share": 0.7}, "(median 51%)"),
    ],
)
def test_a_crop_that_cuts_much_away_is_reported(tmp_path, sizes, options, expected):
    line = cropped(tmp_path, sizes, **options)
    assert expected in line and (
        line.endswith(
            "--data.resize pad, which pads images to a square, or whole, which squashes them"
        )
        or not line
    )
    assert bool(line) == bool(expected)


def test_the_share_that_is_cut_away_is_that_of_the_pipeline(tmp_path):
    """Compared with the output of the evaluation pipeline on images whose pixels have the number of their column."""
    columns = np.tile(np.arange(240, dtype=np.uint8), (80, 1))
    for resize in ("shorter_side", "squash", "whole", "pad"):
        seen = eval_transform(70, resize)(image=np.dstack([columns] * 3))["image"]
        width = (int(seen.max()) - int(seen.min()) + 1) / 240
        height = 1 if resize in ("whole", "pad") else 7 / 8
        assert 1 - width * height == pytest.approx(cropped_area(80, 240, resize, 7 / 8), abs=0.02)


def test_images_that_cannot_be_read_do_not_stop_it(tmp_path):
    assert cropped(tmp_path / "other", [WIDE]) != ""
    for name in ("a", "b"):
        (tmp_path / "other/train" / name / "0.png").write_bytes(b"\x89PNG")
    assert overview.crop_line(data(tmp_path / "other", val_fraction=0)) == ""


def test_predict_says_how_many(colours, cli, tmp_path, caplog):
    images = data(colours, image_size=28)
    trainer = fit(
        Classifier(images.class_names, "small_cnn", weights=None, scheduler=None),
        images,
        max_steps=0,
    )
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    cli(
        "predict",
        "--ckpt_path",
        "some.ckpt",
        "--data.predict",
        Path(colours, "test"),
        "--trainer.accelerator",
        "cpu",
    )
    assert "predicting 30 images" in [record.getMessage() for record in caplog.records]


def test_a_run_that_continues_has_the_rates_of_its_checkpoint(colours, caplog):
    # none is made
    model = Classifier(data(colours).class_names, **SMALL, optimizer=lambda params: 1 / 0)
    assert overview._network(model, "last.ckpt").endswith("rates of the checkpoint")
