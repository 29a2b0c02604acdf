"""The settings of a data module, which are checked before any file is read, and the transforms that they describe."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import albumentations as A

from finetune.data.groups import check_group_by
from finetune.data.image_files import normal_path
from finetune.data.tables.table_file import is_table
from finetune.data.transforms import (
    CROP_SHARE,
    Interpolation,
    ResizeMode,
    eval_transform,
    train_transform,
)
from finetune.models.checkpoint_values import (
    MAX_AUGMENTATIONS,
    MAX_EXCLUDED,
    MAX_FOLDS,
    MAX_IN_A_BATCH,
    MAX_PIXELS,
    MAX_RESIZED,
    MIN_CROP_SHARE,
    MIN_PIXELS,
    are_augmentations,
)
from finetune.system.file_names import composed
from finetune.system.messages import WrongUsage


@dataclass(frozen=True)
class Preparation:
    """How images are prepared for the network. The attributes are arguments of `ImageDataModule`.

    Raises:
        WrongUsage: A value is out of range.
    """

    image_size: int
    eval_image_size: int | None = None
    resize: ResizeMode = "shorter_side"
    interpolation: Interpolation = "bilinear"
    crop_share: float = CROP_SHARE
    cache_size: int | None = None

    @property
    def evaluated_size(self) -> int:
        """Side of the input in evaluation, in pixels."""
        return self.eval_image_size or self.image_size

    def eval_transform(self, size: int) -> A.Compose:
        """Return the transform of evaluation to an input of this size."""
        return eval_transform(size, self.resize, self.interpolation, self.crop_share)

    def __post_init__(self) -> None:
        for name in ("image_size", "eval_image_size"):
            size = getattr(self, name)
            if size is not None and size < MIN_PIXELS:
                raise WrongUsage(f"{name} must be at least {MIN_PIXELS}, got {size}")
        largest = max(self.image_size, self.evaluated_size)
        if largest > MAX_PIXELS:
            raise WrongUsage(
                f"image_size must be at most {MAX_PIXELS}, got {largest}; most networks take 224"
            )
        if not MIN_CROP_SHARE <= self.crop_share <= 1:
            raise WrongUsage(
                f"crop_share must be from {MIN_CROP_SHARE} to 1, got {self.crop_share}"
            )
        side = self.evaluated_size / self.crop_share
        if side > MAX_RESIZED:
            raise WrongUsage(
                f"crop_share {self.crop_share} would resize images to {side:,.0f} pixels, at most {MAX_RESIZED:,}"
            )
        if self.cache_size is not None and self.cache_size < largest:
            name = "image_size" if largest == self.image_size else "eval_image_size"
            raise WrongUsage(f"cache_size {self.cache_size} must be at least {name}, {largest}")


@dataclass(frozen=True)
class Augmentation:
    """How training images are changed at random. The attributes are arguments of `ImageDataModule`.

    Raises:
        WrongUsage: A value is out of range, or the list has more transforms than a checkpoint may hold.
    """

    crop_and_flip: bool = True
    min_crop: float = 1.0
    augmentations: list[dict[str, Any]] | None = None
    mixup: float = 0.0
    cutmix: float = 0.0

    def train_transform(self, size: int, preparation: Preparation) -> A.Compose:
        """Return the transform of training to an input of this size."""
        return train_transform(
            size,
            self.augmentations or (),
            self.min_crop,
            None if self.crop_and_flip else preparation.eval_transform(size),
            preparation.interpolation,
            is_padded=preparation.resize == "pad",
        )

    def __post_init__(self) -> None:
        if not 0 < self.min_crop <= 1:
            raise WrongUsage(f"min_crop must be above 0 and at most 1, got {self.min_crop}")
        for name, value in (("mixup", self.mixup), ("cutmix", self.cutmix)):
            if not 0 <= value < math.inf:
                raise WrongUsage(f"{name} must be at least 0 and finite, got {value}")
        if not are_augmentations(self.augmentations):
            raise WrongUsage(
                f"augmentations must be a list of at most {MAX_AUGMENTATIONS} transforms, each with class_path and "
                "init_args of plain values"
            )


@dataclass(frozen=True)
class Splitting:
    """How images without splits are split. The attributes are arguments of `ImageDataModule`.

    Raises:
        WrongUsage: A value is out of range, no training data would be left, or only one of `fold` and `num_folds` is
            set.
    """

    val_fraction: float = 0.0
    test_fraction: float = 0.0
    split_seed: int = 0
    group_by: str | None = None
    num_folds: int | None = None
    fold: int | None = None

    def __post_init__(self) -> None:
        for name in ("val_fraction", "test_fraction"):
            fraction = getattr(self, name)
            if not 0 <= fraction < 1:
                raise WrongUsage(f"{name} must be at least 0 and below 1, got {fraction}")
        if self.val_fraction + self.test_fraction >= 1:
            text = f"val_fraction {self.val_fraction} and test_fraction {self.test_fraction}"
            raise WrongUsage(f"{text} must leave some training data")
        self._check_folds()
        check_group_by(self.group_by)

    def _check_folds(self) -> None:
        if self.num_folds is None and self.fold is None:
            return
        if self.num_folds is None or self.fold is None:
            raise WrongUsage(
                "fold and num_folds go together: finetune fit FOLDER --folds 5 runs all folds"
            )
        if not 2 <= self.num_folds <= MAX_FOLDS or not 1 <= self.fold <= self.num_folds:
            raise WrongUsage(
                f"num_folds must be from 2 to {MAX_FOLDS} and fold from 1 to num_folds, got {self.num_folds} and "
                f"{self.fold}"
            )
        if self.val_fraction + 1 / self.num_folds >= 1:
            raise WrongUsage(
                f"val_fraction {self.val_fraction} and one fold of {self.num_folds} must leave some training data"
            )


def check_loading(batch_size: int, num_workers: int | str, cache_limit_gb: float) -> None:
    """Check the numbers that say how images are loaded.

    Raises:
        WrongUsage: A value is out of range.
    """
    if not 1 <= batch_size <= MAX_IN_A_BATCH:
        limit = "at least 1" if batch_size < 1 else f"at most {MAX_IN_A_BATCH:,}"
        raise WrongUsage(f"batch_size must be {limit}, got {batch_size:,}")
    if not cache_limit_gb >= 0:
        raise WrongUsage(f"cache_limit_gb must be at least 0, got {cache_limit_gb}")
    if isinstance(num_workers, int) and num_workers < 0:
        raise WrongUsage(f"num_workers must be at least 0, got {num_workers}")


def check_lists(exclude: Sequence[str], merge: Sequence[str] | str | None) -> None:
    """Check that lists are not longer than a checkpoint may hold; `finetune test` refuses longer ones.

    Raises:
        WrongUsage: A list is too long.
    """
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


def required_folder(root: str | None) -> str:
    """Return the folder of a data set.

    Raises:
        WrongUsage: `root` is None.
    """
    if root is None:
        raise WrongUsage(
            "no data: pass the folder of images, or --data.root FOLDER, or a table of images"
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
