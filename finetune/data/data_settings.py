"""Checks of a data module's arguments, before any file is read."""

import math
from collections.abc import Sequence
from typing import Any

from finetune.data.storage import normal_path
from finetune.data.tables.table_file import is_table
from finetune.models.checkpoint_values import (
    MAX_AUGMENTATIONS,
    MAX_EXCLUDED,
    MAX_FOLDS,
    MAX_IN_A_BATCH,
    MAX_PIXELS,
    MAX_RESIZED,
    MIN_CROP_SHARE,
    are_augmentations,
)
from finetune.system.file_names import composed
from finetune.system.messages import WrongUsage


def check_sizes(
    batch_size: int,
    image_size: int,
    cache_size: int | None,
    cache_limit_gb: float,
    num_workers: int | str,
    schedule: Sequence[int] = (),
    eval_image_size: int | None = None,
    crop_share: float = 1.0,
) -> None:
    """Check sizes and numbers.

    Raises:
        WrongUsage: A value is out of range.
    """
    if batch_size < 1 or image_size < 8:
        raise WrongUsage(
            f"batch_size must be at least 1 and image_size 8, got {batch_size} and {image_size}"
        )
    if batch_size > MAX_IN_A_BATCH:
        raise WrongUsage(f"batch_size must be at most {MAX_IN_A_BATCH:,}, got {batch_size:,}")
    if max(image_size, eval_image_size or 0, *schedule) > MAX_PIXELS:
        largest = max(image_size, eval_image_size or 0, *schedule)
        raise WrongUsage(
            f"image_size must be at most {MAX_PIXELS}, got {largest}; most networks take 224"
        )
    if eval_image_size is not None and eval_image_size < 8:
        raise WrongUsage(f"eval_image_size must be at least 8, got {eval_image_size}")
    if not MIN_CROP_SHARE <= crop_share <= 1:
        raise WrongUsage(f"crop_share must be from {MIN_CROP_SHARE} to 1, got {crop_share}")
    if (side := (eval_image_size or image_size) / crop_share) > MAX_RESIZED:
        raise WrongUsage(
            f"crop_share {crop_share} would resize images to {side:,.0f} pixels, at most {MAX_RESIZED:,}"
        )
    sizes = {"image_size": image_size, "eval_image_size": eval_image_size or 0}
    sizes["image_size_schedule"] = max(schedule, default=0)
    name = max(sizes, key=lambda name: sizes[name])
    if cache_size is not None and cache_size < sizes[name]:
        raise WrongUsage(f"cache_size {cache_size} must be at least {name}, {sizes[name]}")
    if not cache_limit_gb >= 0 or (isinstance(num_workers, int) and num_workers < 0):
        raise WrongUsage(
            f"cache_limit_gb {cache_limit_gb} and num_workers {num_workers} must not be negative"
        )


def check_shares(val_fraction: float, test_fraction: float, min_crop: float) -> None:
    """Check the fractions of the splits and the smallest crop.

    Raises:
        WrongUsage: A value is out of range, or no training data would be left.
    """
    if not 0 < min_crop <= 1:
        raise WrongUsage(f"min_crop must be above 0 and at most 1, got {min_crop}")
    if not 0 <= val_fraction < 1 or not 0 <= test_fraction < 1 or val_fraction + test_fraction >= 1:
        fractions = f"val_fraction {val_fraction} and test_fraction {test_fraction}"
        raise WrongUsage(f"{fractions} must leave some training data")


def check_folds(fold: int | None, num_folds: int | None, val_fraction: float) -> None:
    """Check the settings of a cross-validation.

    Raises:
        WrongUsage: Only one of them is given, a value is out of range, or no training data would be left.
    """
    if num_folds is None and fold is None:
        return
    if num_folds is None or fold is None:
        raise WrongUsage(
            "fold and num_folds go together: finetune fit FOLDER --folds 5 runs all folds"
        )
    if not 2 <= num_folds <= MAX_FOLDS or not 1 <= fold <= num_folds:
        raise WrongUsage(
            f"num_folds must be from 2 to {MAX_FOLDS} and fold from 1 to num_folds, got {num_folds} and {fold}"
        )
    if val_fraction + 1 / num_folds >= 1:
        raise WrongUsage(
            f"val_fraction {val_fraction} and one fold of {num_folds} must leave some training data"
        )


def check_lists(
    augmentations: list[dict[str, Any]] | None,
    exclude: Sequence[str],
    merge: Sequence[str] | str | None = None,
) -> None:
    """Check that lists are not longer than a checkpoint may hold; `finetune test` refuses longer ones.

    Raises:
        WrongUsage: A list is too long.
    """
    if not are_augmentations(augmentations):
        raise WrongUsage(
            f"augmentations must be a list of at most {MAX_AUGMENTATIONS} transforms, each with class_path and "
            "init_args of plain values"
        )
    if len(exclude) > MAX_EXCLUDED:
        raise WrongUsage(
            f"exclude can name {MAX_EXCLUDED:,} class folders at most, got {len(exclude):,}"
        )
    if merge is not None and len(merge) > MAX_EXCLUDED:
        raise WrongUsage(f"merge can have {MAX_EXCLUDED:,} entries at most, got {len(merge):,}")


def parse_merge(merge: Sequence[str] | str | None) -> dict[str, str]:
    """Return the new name of each class that is merged.

    Args:
        merge: `a,b:c` for each new class c, which takes the images of a and b.

    Raises:
        WrongUsage: A text has another form, or a class is merged twice.
    """
    texts = [merge] if isinstance(merge, str) else merge or []
    new_names: dict[str, str] = {}
    for text in texts:
        listed, colon, target = text.rpartition(":")
        names = [composed(name.strip()) for name in listed.split(",")]
        if not colon or not target.strip() or not all(names):
            raise WrongUsage(
                f"--data.merge {text!r}: write 'a,b:c' to merge the classes a and b as c"
            )
        for name in names:
            if name in new_names:
                raise WrongUsage(f"--data.merge merges the class {name!r} twice")
            new_names[name] = composed(target.strip())
    for name, target in new_names.items():
        if new_names.get(target, target) != target:
            raise WrongUsage(
                f"--data.merge: {name!r} becomes {target!r}, which is merged itself; name the last class directly"
            )
    return new_names


def check_mixing(mixup: float, cutmix: float) -> None:
    """Check the strengths of mixup and CutMix.

    Raises:
        WrongUsage: A value is negative or not finite.
    """
    for name, value in (("mixup", mixup), ("cutmix", cutmix)):
        if not 0 <= value < math.inf:
            raise WrongUsage(f"{name} must be at least 0 and finite, got {value}")


def required_folder(root: str | None) -> str:
    """Return the folder of a data set.

    Raises:
        WrongUsage: `root` is None.
    """
    if root is None:
        raise WrongUsage(
            "no data: give the folder of images, or --data.root FOLDER, or a table of images"
        )
    return normal_path(root)


def missing_split_message(root: str | None, split: str) -> str:
    """Return the error message for a folder without the split that a command needs."""
    if root is not None and is_table(root) and split != "predict":
        return f"{root} has no rows of the split '{split}'"
    if split == "train":
        return f"{root} has no 'train'; put the training images in {root}/train/CLASS"
    if split == "predict":
        return "no images to predict: finetune predict CKPT IMAGES (--data.predict)"
    command = "validate" if split == "val" else "test"
    hint = f"measure all of a folder of class folders: finetune {command} CKPT FOLDER (--data.root)"
    return f"{root} has no {split} split: put images in {root}/{split}/CLASS, or {hint}"
