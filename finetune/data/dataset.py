"""What one index gives, and how several become a batch."""

import logging
from collections.abc import Callable
from typing import Any, Literal

import albumentations as A
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from finetune.data.decode import DecodeError
from finetune.data.mixing import Mixing
from finetune.data.samplers import augmentation_seed
from finetune.data.targets import ClassIndex
from finetune.data.transforms import set_random_seed

log = logging.getLogger(__name__)

_UNMIXED = Mixing()


class ImageDataset(Dataset[dict[str, Any]]):
    """Pictures by index, decoded and transformed.

    An index is an int in evaluation and (epoch, index) in training, where it seeds the transform: the pixels depend on
    (seed, epoch, index) alone. A mixed picture's partner is as the epoch has it where it stands by itself, which is how
    partners from a batch would be; where that can't be decoded and bad pictures are left out, nothing is mixed in.

    Args:
        read: Gives picture i as (H, W, 3) uint8 RGB; raises `DecodeError`.
        targets: What each image shows, N.
        transform: To (h, w, 3) uint8.
        seed: Seed of the random transforms.
        on_bad_image: What a picture that can't be decoded does: end the run, or be left out.
        mixing: What is done with two pictures in training, which then have `partner_label` and `share`, too.
        by_epoch: The transform of an epoch, where that is not the same for all.
    """

    def __init__(
        self,
        read: Callable[[int], np.ndarray],
        targets: ClassIndex,
        transform: A.Compose,
        seed: int = 0,
        on_bad_image: Literal["error", "skip"] = "error",
        mixing: Mixing = _UNMIXED,
        by_epoch: Callable[[int], A.Compose] | None = None,
    ) -> None:
        self.read = read
        self.targets = targets
        self.transform = transform
        self.seed = seed
        self.on_bad_image, self.mixing = on_bad_image, mixing
        self.by_epoch = by_epoch

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Any]:
        epoch, index = key if isinstance(key, tuple) else (None, key)
        item = self._alone(epoch, index)
        mix = None if epoch is None else self.mixing.draw(self.seed, epoch, index, len(self))
        if mix is None or item["image"] is None:
            return item
        partner = self._alone(epoch, mix.partner)
        image = item["image"]
        share = 1.0
        if partner["image"] is not None:
            image, share = mix.apply(image, partner["image"])
        return {**item, "image": image, "partner_label": partner["label"], "share": share}

    def _alone(self, epoch: int | None, index: int) -> dict[str, Any]:
        item = {"index": index, "label": self.targets[index], "image": None, "error": ""}
        try:
            picture = self.read(index)
        except DecodeError as error:
            if self.on_bad_image == "error":
                raise DecodeError(
                    f"{error}; --data.on_bad_image skip leaves out what can't be decoded"
                ) from error
            return {**item, "error": str(error)}
        try:
            image = self._transformed(picture, epoch, index)
        except Exception:
            if picture.flags.writeable:
                raise
            # it writes into its input, which is a cache's
            image = self._transformed(picture.copy(), epoch, index)
        return {**item, "image": image}

    def _transformed(self, picture: np.ndarray, epoch: int | None, index: int) -> np.ndarray:
        if epoch is None:
            return self.transform(image=picture)["image"]
        transform = self.transform if self.by_epoch is None else self.by_epoch(epoch)
        set_random_seed(transform, augmentation_seed(self.seed, epoch, index))
        return transform(image=picture)["image"]


class Collate:
    """Makes a batch of what a data set gives for several indices, perhaps none.

    Returns a dict: `image` (B, 3, h, w) uint8 in channels_last order, `label` and `index` (B,) int64, and `bad`, a list
    of (index, error) for the pictures that could not be decoded; these are not among the B. Of mixed pictures there are
    `partner_label` (B,) int64, the class of what was mixed in, and `share` (B,) float32, at least a half, of `label`.

    Args:
        image_size: Side in pixels, also of a batch of no pictures.
        others: What the side may be, too, of a whole batch.
    """

    def __init__(self, image_size: int, *others: int) -> None:
        self.sizes = (image_size, *others)

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        good = [item for item in items if item["image"] is not None]
        side = next(
            (len(item["image"]) for item in good[:1] if len(item["image"]) in self.sizes),
            self.sizes[0],
        )
        images = np.empty((len(good), side, side, 3), np.uint8)
        for image, item in zip(images, good, strict=True):
            image[:] = item["image"]
        mixed: dict[str, Tensor] = {}
        if good and "share" in good[0]:
            partners = ClassIndex.collate(item["partner_label"] for item in good)
            mixed["partner_label"] = torch.from_numpy(partners)
            mixed["share"] = torch.tensor([item["share"] for item in good], dtype=torch.float32)
        return {
            "image": torch.from_numpy(images).permute(0, 3, 1, 2),
            "label": torch.from_numpy(ClassIndex.collate(item["label"] for item in good)),
            "index": torch.tensor([item["index"] for item in good], dtype=torch.int64),
            "bad": [(item["index"], item["error"]) for item in items if item["image"] is None],
            **mixed,
        }
