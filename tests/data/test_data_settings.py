"""Settings of a data module that can't be, told before a file is looked at."""

import pytest

from finetune.data.data_settings import check_mixing, check_shares, check_sizes, folder_of, is_without
from finetune.system.messages import WrongUsage

SIZES = {"batch_size": 1, "image_size": 8, "cache_size": None, "cache_limit_gb": 0.0, "num_workers": "auto"}
SHARES = {"val_fraction": 0.0, "test_fraction": 0.0, "min_crop": 1.0, "num_views": None}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"image_size": 7}, "image_size 8"),
        ({"cache_size": 7}, "cache_size 7 must be at least image_size, 8"),
        ({"cache_size": 9, "eval_image_size": 10}, "cache_size 9 must be at least eval_image_size, 10"),
        ({"cache_size": 9, "schedule": (12, 8)}, "cache_size 9 must be at least image_size_schedule, 12"),
        ({"eval_image_size": 7}, "eval_image_size must be at least 8, got 7"),
        ({"cache_limit_gb": -1.0}, "must not be negative"),
        ({"num_workers": -1}, "must not be negative"),
    ],
)
def test_sizes(wrong, told):
    check_sizes(**SIZES)
    with pytest.raises(WrongUsage, match=told):
        check_sizes(**{**SIZES, **wrong})


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"val_fraction": 1.0}, "must leave some training data"),
        ({"test_fraction": -0.1}, "must leave some training data"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, "must leave some training data"),
        ({"min_crop": 0.0}, "min_crop must be above 0"),
        ({"num_views": 0}, "num_views must be at least 1"),
        ({"crop_share": 0.0}, "crop_share must be above 0"),
        ({"crop_share": 1.1}, "crop_share must be above 0"),
    ],
)
def test_shares(wrong, told):
    check_shares(**SHARES)
    with pytest.raises(WrongUsage, match=told):
        check_shares(**{**SHARES, **wrong})


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"mixup": -0.1}, "mixup must be at least 0 and finite, got -0.1"),
        ({"cutmix": float("inf")}, "cutmix must be at least 0 and finite"),
        ({"cutmix": float("nan")}, "cutmix must be at least 0 and finite"),
        ({"num_views": 2}, "cutmix mixes anew in each epoch, num_views repeats pictures: leave it out"),
    ],
)
def test_mixing(wrong, told):
    right = {"mixup": 0.0, "cutmix": 1.0, "num_views": None}
    check_mixing(**right)
    check_mixing(**{**right, "cutmix": 0.0, "num_views": 2})
    with pytest.raises(WrongUsage, match=told):
        check_mixing(**{**right, **wrong})


def test_a_folder_that_nobody_has_named():
    assert folder_of("some").name == "some"
    with pytest.raises(
        WrongUsage, match="no data: give the folder of the pictures, by its name or as --data.root FOLDER"
    ):
        folder_of(None)


def test_what_lacks_is_told_by_its_split():
    assert is_without("some", "val").startswith("some has no val split: put pictures in some/val/CLASS")
    assert "finetune predict CKPT PICTURES" in is_without("some", "predict")
    assert is_without("some", "train") == "some holds no 'train'; put the training pictures in some/train/CLASS"
