"""Invalid settings of a data module are refused before any file is read."""

import inspect
from dataclasses import fields

import pytest

from finetune import ImageFolderData
from finetune.data.data_settings import (
    Augmentation,
    Preparation,
    Splitting,
    check_loading,
    missing_split_message,
)
from finetune.system.messages import WrongUsage

RIGHT = {
    check_loading: {
        "batch_size": 1,
        "num_workers": "auto",
        "cache_limit_gb": 0.0,
    },
    Preparation: {"image_size": 8},
    Splitting: {"val_fraction": 0.0, "test_fraction": 0.0},
    Augmentation: {"min_crop": 1.0, "mixup": 0.0, "cutmix": 1.0},
}


@pytest.mark.parametrize(
    ("check", "wrong", "reported"),
    [
        (check_loading, {"batch_size": 0}, "batch_size must be at least 1"),
        (Preparation, {"image_size": 7}, "image_size must be at least 8, got 7"),
        (Preparation, {"cache_size": 7}, "cache_size 7 must be at least image_size, 8"),
        (
            Preparation,
            {"cache_size": 9, "eval_image_size": 10},
            "cache_size 9 must be at least eval_image_size, 10",
        ),
        (Preparation, {"eval_image_size": 7}, "eval_image_size must be at least 8, got 7"),
        (check_loading, {"cache_limit_gb": -1.0}, "cache_limit_gb must be at least 0, got -1.0"),
        (check_loading, {"num_workers": -1}, "num_workers must be at least 0, got -1"),
        # the checkpoint of such a fit would be refused
        (
            Splitting,
            {"val_fraction": 1.0},
            "^val_fraction must be at least 0 and below 1, got 1.0$",
        ),
        (
            Splitting,
            {"test_fraction": -0.1},
            "^test_fraction must be at least 0 and below 1, got -0.1$",
        ),
        (
            Splitting,
            {"val_fraction": 0.5, "test_fraction": 0.5},
            "must leave some training data",
        ),
        (Augmentation, {"min_crop": 0.0}, "min_crop must be above 0"),
        (Preparation, {"crop_share": 0.09}, "crop_share must be from 0.1 to 1, got 0.09"),
        (Preparation, {"crop_share": 1.1}, "crop_share must be from 0.1 to 1"),
        (
            Preparation,
            {"image_size": 4096, "crop_share": 0.1},
            "would resize images to 40,960 pixels, at most 16,384",
        ),
        (check_loading, {"batch_size": 2**20 + 1}, "batch_size must be at most 1,048,576"),
        (Augmentation, {"mixup": -0.1}, "mixup must be at least 0 and finite, got -0.1"),
        (Augmentation, {"cutmix": float("inf")}, "cutmix must be at least 0 and finite"),
        (Augmentation, {"cutmix": float("nan")}, "cutmix must be at least 0 and finite"),
    ],
)
def test_settings_that_cannot_be_are_reported(check, wrong, reported):
    check(**RIGHT[check])
    with pytest.raises(WrongUsage, match=reported):
        check(**{**RIGHT[check], **wrong})


def test_settings_have_the_names_of_options():
    names = set(inspect.signature(ImageFolderData).parameters)
    for settings in (Preparation, Splitting, Augmentation):
        assert {field.name for field in fields(settings)} <= names


def test_a_folder_that_nobody_has_named():
    with pytest.raises(
        WrongUsage, match="no data: pass the folder of images, or --data.root FOLDER"
    ):
        ImageFolderData()


def test_what_lacks_is_described_by_its_split():
    assert missing_split_message("some", "val").startswith(
        "some has no val split: put images in some/val/CLASS"
    )
    assert "finetune predict CKPT IMAGES" in missing_split_message("some", "predict")
    assert (
        missing_split_message("some", "train")
        == "some has no 'train'; put the training images in some/train/CLASS"
    )
