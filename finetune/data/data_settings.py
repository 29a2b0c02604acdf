"""The settings of a data module by what they are for, and the transforms that they describe."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import albumentations as A

from finetune.data.groups import check_group_by
from finetune.data.image_files import normal_path
from finetune.data.tables.table_file import is_table
from finetune.data.transforms import (
    eval_transform,
    train_transform,
)
from finetune.settings.schema import CROP_SHARE, Interpolation, ResizeMode
from finetune.system.file_names import composed
from finetune.system.messages import WrongUsage


@dataclass(frozen=True)
class Preparation:
    """How images are prepared for the network. The attributes are settings of the data."""

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


@dataclass(frozen=True)
class Augmentation:
    """How training images are changed at random. The attributes are settings of the data."""

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


@dataclass(frozen=True)
class Splitting:
    """How images without splits are split. The attributes are settings of the data.

    Raises:
        WrongUsage: `group_by` is no regular expression.
    """

    val_fraction: float = 0.0
    test_fraction: float = 0.0
    split_seed: int = 0
    group_by: str | None = None
    num_folds: int | None = None
    fold: int | None = None

    def __post_init__(self) -> None:
        check_group_by(self.group_by)


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
