"""The dataset, which maps an index to a sample, and the function that collates samples to a batch."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import albumentations as A
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from finetune.data.decode import DecodeError
from finetune.data.mixing import Mix, Mixing
from finetune.data.samplers import augmentation_seed
from finetune.data.targets import ClassIndex, Targets
from finetune.data.transforms import set_random_seed

log = logging.getLogger(__name__)

_UNMIXED = Mixing()


class ImageDataset(Dataset[dict[str, Any]]):
    """Decoded and transformed images by index.

    In evaluation an index is an int. In training it is (epoch, index), which seeds the transform: pixels depend only on
    (seed, epoch, index). With mixing, the partner image is augmented as it is by itself in the same epoch. If the
    partner cannot be decoded and `on_bad_image` is "skip", the image is not mixed.

    Args:
        read: Returns image i as (H, W, 3) uint8 RGB; raises `DecodeError`.
        targets: The target of each image, N.
        transform: Maps an image, which may be a read-only view of the cache, to (h, w, 3) uint8.
        seed: Seed of the random transforms.
        on_bad_image: What to do with an image that cannot be decoded: raise an error, or skip it.
        mixing: Mixup and CutMix in training. Mixed samples also have `partner_label` and `share`.
        weights: Weight of each image in the loss, (N,). Samples then also have `weight`, mixed ones `partner_weight`.
    """

    def __init__(
        self,
        read: Callable[[int], np.ndarray],
        targets: Targets,
        transform: A.Compose,
        seed: int = 0,
        on_bad_image: Literal["error", "skip"] = "error",
        mixing: Mixing = _UNMIXED,
        weights: np.ndarray | None = None,
    ) -> None:
        self.read = read
        self.targets = targets
        self.transform = transform
        self.seed = seed
        self.on_bad_image = on_bad_image
        self.mixing = mixing
        self.weights = weights

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Any]:
        epoch, index, mix = self._parse_key(key)
        item = self._load(epoch, index)
        if mix is None or item["image"] is None:
            return item
        partner = self._load(epoch, mix.partner)
        image = item["image"]
        share = 1.0
        if partner["image"] is not None:
            image, share = mix.apply(image, partner["image"])
        mixed = {**item, "image": image, "partner_label": partner["label"], "share": share}
        if self.weights is not None:
            mixed["partner_weight"] = partner["weight"]
        return mixed

    def indices_of(self, keys: Iterable[int | tuple[int, int]]) -> Iterator[int]:
        """Yield the indices of the images that a batch of keys needs: their own, and the partners with mixing."""
        for key in keys:
            _, index, mix = self._parse_key(key)
            yield index
            if mix is not None:
                yield mix.partner

    def _parse_key(self, key: int | tuple[int, int]) -> tuple[int | None, int, Mix | None]:
        """Return the epoch, None in evaluation; the index; and the partner with its share, None without mixing."""
        if not isinstance(key, tuple):
            return None, key, None
        epoch, index = key
        return epoch, index, self.mixing.draw(self.seed, epoch, index, len(self))

    def _load(self, epoch: int | None, index: int) -> dict[str, Any]:
        item: dict[str, Any] = {
            "index": index,
            "label": self.targets[index],
            "image": None,
            "error": "",
        }
        if self.weights is not None:
            item["weight"] = float(self.weights[index])
        try:
            decoded = self.read(index)
        except DecodeError as error:
            if self.on_bad_image == "error":
                hint = "--data.on_bad_image skip skips images that cannot be decoded"
                raise DecodeError(f"{error}; {hint}") from error
            return {**item, "error": str(error)}
        if epoch is not None:
            set_random_seed(self.transform, augmentation_seed(self.seed, epoch, index))
        return {**item, "image": self.transform(image=decoded)["image"]}


class Collate:
    """Collates samples to a batch. The list of samples may be empty.

    A batch is a dict:

    - `image`: (B, 3, h, w) uint8 in channels_last order.
    - `index`: (B,) int64.
    - `label`: the class (B,) int64; if images have several labels, (B, K) float32, 0 or 1.
    - `bad`: list of (index, error) of the images that could not be decoded. They are not among the B.
    - `partner_label`: the label of the partner, as `label`; only with mixing.
    - `share`: (B,) float32, the share of `label` in the mixed image, at least 0.5; only with mixing.
    - `weight`, `partner_weight`: (B,) float32, the weights of the image and of its partner in the loss; only if images
      have weights, the latter only with mixing.

    Args:
        side: Side of the images in pixels.
        collate_labels: Collates the labels, as `Targets.collate`.
    """

    def __init__(
        self,
        side: int,
        collate_labels: Callable[[Iterable[Any]], np.ndarray] = ClassIndex.collate,
    ) -> None:
        self.side = side
        self.collate_labels = collate_labels

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        good = [item for item in items if item["image"] is not None]
        images = np.empty((len(good), self.side, self.side, 3), np.uint8)
        for image, item in zip(images, good, strict=True):
            image[:] = item["image"]
        optional: dict[str, Tensor] = {}
        if good and "share" in good[0]:
            partners = self.collate_labels(item["partner_label"] for item in good)
            optional["partner_label"] = torch.from_numpy(partners)
        for name in ("share", "weight", "partner_weight"):
            if good and name in good[0]:
                optional[name] = torch.tensor([item[name] for item in good], dtype=torch.float32)
        return {
            "image": torch.from_numpy(images).permute(0, 3, 1, 2),
            "label": torch.from_numpy(self.collate_labels(item["label"] for item in good)),
            "index": torch.tensor([item["index"] for item in good], dtype=torch.int64),
            "bad": [(item["index"], item["error"]) for item in items if item["image"] is None],
            **optional,
        }
