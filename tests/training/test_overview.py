"""What a fit says before it begins."""

import logging
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
from colours import QUICKEST, draw_colours
from small_fits import SMALL, data, fit

from finetune import Classifier
from finetune.training import overview


def told(caplog, pictures, model=None, **options) -> list[str]:
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, **options
    )
    caplog.clear()
    with caplog.at_level(logging.INFO, "finetune"):
        overview.tell(trainer, model or Classifier(pictures.class_names, "small_cnn", weights=None), pictures)
    return [record.getMessage() for record in caplog.records]


def test_three_lines_before_training(colours, cli, caplog):
    cli("fit", "--data.root", colours, *QUICKEST, "--test_after_fit", "false")
    lines = [record.getMessage() for record in caplog.records if record.name == "finetune.training.overview"]
    train = np.bincount(data(colours).splits["train"].labels)
    val = 60 - train.sum()
    assert lines == [
        f"pictures: {colours}: train {train.sum()} (its train folder), val {val} (set apart from training, "
        "split_seed 0), test 30 (its test folder); 3 classes in train: "
        f"blue {train[0]}, green {train[1]}, red {train[2]}",
        "network: small_cnn, random weights; 0.30 of 0.30 million numbers learn, frozen: nothing; "
        "SGD at 0.005 (backbone), 0.05 (head)",
        "training: 1 x cpu, precision 32-true, 4 batches of 16 an epoch, max_epochs 1",
    ]


def test_where_the_splits_come_from(tmp_path, caplog):
    draw_colours(tmp_path / "drawn", train=10)
    pictures = data(tmp_path / "drawn/train", val_fraction=0)
    line, *_ = told(caplog, pictures)
    test = len(pictures.splits["test"].labels)
    assert f"train {30 - test} (all that are not set apart), val none, test {test} (set apart from training, " in line


def test_what_is_frozen_and_the_rates(colours, caplog):
    pictures = data(colours)
    frozen = Classifier(pictures.class_names, "resnet18", None, freeze="layer3", freeze_batch_norm=True)
    assert told(caplog, pictures, frozen)[1] == (
        "network: resnet18, random weights; 8.40 of 11.18 million numbers learn, "
        "frozen: all up to layer3 and batch norm's statistics; SGD at 0.005 (backbone), 0.05 (head)"
    )
    decayed = Classifier(pictures.class_names, "resnet18", None, layer_decay=0.5, decay_norm_and_bias=False)
    assert told(caplog, pictures, decayed)[1].endswith("SGD at 0.000156 (conv1), 0.0025 (layer4), 0.05 (head)")


@pytest.mark.parametrize(("limit", "expected"), [(1.0, "5 batches"), (2, "2 batches"), (0.5, "2 batches")])
def test_batches_an_epoch(colours, caplog, limit, expected):
    assert expected in told(caplog, data(colours), limit_train_batches=limit, max_steps=7)[2]


def test_only_the_first_device_speaks(colours, caplog, monkeypatch):
    monkeypatch.setattr(pl.Trainer, "is_global_zero", False)
    assert told(caplog, data(colours)) == []


def test_training_pictures_are_looked_at_for_dark_samples(colours, caplog, monkeypatch):
    looked_at = []
    monkeypatch.setattr(overview, "warn_of_dark_samples", looked_at.append)
    told(caplog, pictures := data(colours))
    assert [list(paths) for paths in looked_at] == [list(pictures.splits["train"].paths)]


def test_many_classes_are_not_listed(colours, caplog):
    pictures = data(colours)
    pictures.class_names = [f"class {i}" for i in range(20)]
    split = pictures.splits["train"]
    pictures.splits = {"train": type(split)(split.read, np.arange(30) % 20, split.paths[:30], "folder train")}
    assert told(caplog, pictures)[0].endswith("; 20 classes in train: 1 to 2 pictures each")


def test_doubts(tmp_path):
    """A class of two pictures, one set apart; a class of one, of which no other split has any; a small test."""
    root = draw_colours(tmp_path / "few", train=12, test=9)
    for name, left in (("blue", 2), ("green", 1)):
        for path in sorted((root / "train" / name).iterdir())[left:]:
            path.unlink()
    assert list(overview.doubts(data(root))) == [
        "too few training pictures to learn from: blue 1, green 1",
        "val has no pictures of green: its results say nothing about them",
        "test has 27 pictures only: the standard error of an accuracy is up to 10 points",
    ]


def test_three_pictures_of_a_class_and_thirty_to_test_on_are_not_doubted_one_fewer_are(tmp_path):
    root = draw_colours(tmp_path / "few", train=3, test=10)
    assert list(overview.doubts(data(root, val_fraction=0))) == []
    (root / "train/blue/00.png").unlink()
    (root / "test/red/00.png").unlink()
    assert list(overview.doubts(data(root, val_fraction=0))) == [
        "too few training pictures to learn from: blue 2",
        "test has 29 pictures only: the standard error of an accuracy is up to 9 points",
    ]


def test_predict_says_how_many(colours, cli, tmp_path, caplog):
    pictures = data(colours, image_size=28)
    trainer = fit(Classifier(pictures.class_names, "small_cnn", weights=None), pictures, max_steps=0)
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    cli("predict", "--ckpt_path", "some.ckpt", "--data.predict", Path(colours, "test"), "--trainer.accelerator", "cpu")
    assert "predicting 30 pictures" in [record.getMessage() for record in caplog.records]


def test_a_run_that_goes_on_has_the_rates_of_its_checkpoint(colours, caplog):
    model = Classifier(data(colours).class_names, **SMALL, optimizer=lambda params: 1 / 0)  # none is made
    assert overview._network(model, "last.ckpt").endswith("rates of the checkpoint")
