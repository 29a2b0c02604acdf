"""Albumentations pipelines: (H, W, 3) uint8 RGB to (image_size, image_size, 3) uint8 RGB.

The network normalises its input, so a pipeline always returns uint8.
"""

import copy
import importlib
import inspect
import random
from collections.abc import Mapping, Sequence
from typing import Any

import albumentations as A
import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from finetune.data.resize import Prepare, RandomResizedCrop
from finetune.settings.schema import CROP_SHARE, Interpolation, ResizeMode
from finetune.system.messages import WrongUsage, did_you_mean, reason

# Arguments of `ImageDataModule` that determine how images are prepared.
PREPARATION = ("image_size", "resize", "interpolation", "crop_share")
_KERNELS: dict[Interpolation, Any] = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}


class TrivialAugment(A.ImageOnlyTransform):
    """One random operation at one random strength per image: torchvision's `TrivialAugmentWide`, seeded.

    Source: Müller and Hutter 2021 (arXiv:2103.10158).

    Args:
        p: Probability of applying the transform.
    """

    def __init__(self, p: float = 1.0) -> None:
        from torchvision.transforms.v2 import TrivialAugmentWide  # slow to import

        super().__init__(p=p)
        self._augment = TrivialAugmentWide()

    def get_params(self) -> dict[str, Any]:
        return {"seed": self.py_random.getrandbits(32)}

    def apply(self, img: NDArray[np.uint8], seed: int, **params: Any) -> NDArray[np.uint8]:
        with torch.random.fork_rng(devices=[]):  # torchvision draws from torch's global generator
            torch.default_generator.manual_seed(seed)
            # a copy, because Pillow's array is read-only and the next transform may write to it
            return np.array(self._augment(Image.fromarray(img)))


_OWN = {"TrivialAugment": TrivialAugment}  # available without a module, as albumentations' are


def train_transform(
    image_size: int,
    extra: Sequence[dict[str, Any]] = (),
    min_crop: float = 0.08,
    prepared: A.Compose | None = None,
    interpolation: Interpolation = "bilinear",
    *,
    is_padded: bool = False,
) -> A.Compose:
    """Return the book's training pipeline: random resized crop and flip, then the `extra` transforms.

    Args:
        image_size: Side of the result in pixels.
        extra: More transforms, each as `{"class_path": ..., "init_args": {...}}`: albumentations' or `TrivialAugment`.
        min_crop: Smallest share of the image's area in a crop, in (0, 1].
        prepared: A pipeline that replaces crop and flip.
        interpolation: Kernel for resizing a crop.
        is_padded: Whether to pad the image to a square before the crop, of twice the side, so that a crop of a quarter
            of its area is not enlarged.

    Source: d2l.ai, section "Fine-Tuning".
    """
    size = (image_size, image_size)
    kernel = _KERNELS[interpolation]
    first = [
        RandomResizedCrop(size, scale=(min_crop, 1.0), interpolation=kernel),
        A.HorizontalFlip(),
    ]
    if is_padded:
        first.insert(0, Prepare(2 * image_size, "pad", interpolation))
    if prepared is not None:
        first = prepared.transforms
    return _check_output(
        A.Compose([*first, *(build_transform(spec) for spec in extra)]), image_size
    )


def eval_transform(
    image_size: int,
    resize: ResizeMode = "shorter_side",
    interpolation: Interpolation = "bilinear",
    crop_share: float = CROP_SHARE,
) -> A.Compose:
    """Return the evaluation pipeline: resize to more than `image_size`, by default to 8/7 of it, then crop the centre.

    Args:
        image_size: Side of the result in pixels.
        resize: `shorter_side` keeps the image's proportions. `squash` makes it square, as the book does. `whole` makes
            it square at `image_size` and does not crop. `pad` resizes the longer side to `image_size` and pads the
            shorter one.
        interpolation: Kernel for resizing.
        crop_share: Side of the crop as a share of the resized side, in (0, 1].
    """
    side = resized_side(image_size, crop_share)
    return A.Compose([Prepare(image_size, resize, interpolation, side)])


def preparation(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `eval_transform` from the settings of a data module."""
    return {name: settings[name] for name in PREPARATION if name in settings}


def cropped_area(height: int, width: int, resize: ResizeMode, crop_share: float) -> float:
    """Return the share of an image's area that evaluation's crop removes, in [0, 1). See `eval_transform`."""
    if resize in ("whole", "pad"):
        return 0.0
    shorter_by_longer = 1.0 if resize == "squash" else min(height, width) / max(height, width)
    return 1 - crop_share**2 * shorter_by_longer


def resized_side(image_size: int, crop_share: float = CROP_SHARE) -> int:
    """Return the side in pixels to which evaluation resizes before the centre crop."""
    return round(image_size / crop_share)


def set_random_seed(transform: A.Compose, seed: int) -> None:
    """Make all random numbers of a pipeline a function of the seed.

    The transforms share two generators and draw from them in their order. A transform that is appended does not change
    the draws of the others. albumentations' `set_random_seed` gives each transform its own generators with the same
    seed, so they draw the same numbers: colours would change exactly when the image is flipped.

    Args:
        transform: The pipeline. Its transforms draw from no other generators, as albumentations' own.
        seed: At least 0.
    """
    transform.set_random_state(np.random.default_rng(seed), random.Random(seed))


def build_transform(spec: dict[str, Any]) -> A.BasicTransform:
    """Build the transform of a config.

    Raises:
        WrongUsage: The class or an argument does not exist.
        ValueError: The module cannot be imported, or an argument has an unsupported value.
    """
    if set(spec) - {"class_path", "init_args"} or "class_path" not in spec:
        raise WrongUsage(f"a transform is given as class_path and init_args, got {spec}")
    module_name, _, class_name = spec["class_path"].rpartition(".")
    try:
        module = importlib.import_module(module_name or "albumentations")
    except ImportError as error:
        raise ValueError(f"transform {spec['class_path']}: {error}") from error
    own = {} if module_name else _OWN
    transform_class: Any = own.get(class_name) or getattr(module, class_name, None)
    if transform_class is None:
        near = did_you_mean(class_name, [*dir(module), *own])
        raise WrongUsage(f"there is no transform {class_name!r} in {module.__name__}{near}")
    is_transform = isinstance(transform_class, type) and issubclass(
        transform_class, A.BasicTransform
    )
    if not is_transform:
        raise WrongUsage(f"{spec['class_path']} is not an albumentations transform")
    if transform_class.set_random_seed is not A.BasicTransform.set_random_seed:
        raise WrongUsage(
            f"{spec['class_path']} has a set_random_seed of its own; --seed cannot seed it"
        )
    init_args = spec.get("init_args") or {}
    valid = inspect.signature(transform_class).parameters
    for name in init_args:
        if name not in valid:  # albumentations itself only warns, and then ignores the argument
            raise WrongUsage(f"{class_name} has no argument {name!r}{did_you_mean(name, valid)}")
    try:
        return transform_class(**init_args)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{class_name}: {reason(error)}") from error


def _check_output(transform: A.Compose, image_size: int) -> A.Compose:
    certain = copy.deepcopy(transform)
    for part in certain.transforms:
        part.p = 1.0  # transforms that are applied at random must fit, too
    try:
        result = certain(image=np.zeros((image_size, image_size, 3), np.uint8))["image"]
    except Exception as error:  # a transform of another package may raise any exception
        raise ValueError(f"the training transforms fail on an image: {reason(error)}") from error
    if result.dtype != np.uint8 or result.shape != (image_size, image_size, 3):
        raise ValueError(
            f"the training transforms must give ({image_size}, {image_size}, 3) uint8 images, "
            f"but give {result.shape} {result.dtype}; normalisation is inside the network"
        )
    return transform
