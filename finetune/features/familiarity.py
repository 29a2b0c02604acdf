"""Familiarity: how much an image is like the training images, by the features of the network.

A network predicts one of its classes for any image, also for an image of none of them. The features of such an image
point elsewhere: their cosine with the nearest class mean is low. The familiarity is the rank of this cosine among those
of the validation images, as a share: of images of the classes, on average at most 5 % have a familiarity below 0.05.

Sources: class means of features, Lee et al. 2018 (arXiv:1807.03888); the rank among held-out images as a p-value,
Bates et al. 2021 (arXiv:2104.08279). Other scores are compared in docs/decisions.md.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetune.models.stages import head
from finetune.system.messages import counted

# Shapes: N images, B of them in a batch, D features, K classes.

BELOW = 0.05  # an image below it is called unfamiliar on pages
MOST_IMAGES = 500  # of a split whose features are computed, unless that is too few for each class
_LEAST_OF_CLASS = 10


@dataclass(frozen=True)
class Familiarity:
    """What tells how familiar an image is.

    Attributes:
        means: Mean direction of the features of the training images of each class, (K, D); 0 for a class without any.
        cosines: The highest cosine with a mean of each validation image, ascending, (N,).
    """

    means: Tensor
    cosines: Tensor

    @classmethod
    def fit(cls, means: Tensor, features: Tensor) -> "Familiarity":
        """Return it by class means (K, D), and the features of the validation images (N, D)."""
        return cls(means, _highest_cosines(features, means).sort().values)

    def of(self, features: Tensor) -> Tensor:
        """Return the familiarity of images (B,), from 0 to 1 in float64, by their features (B, D)."""
        cosines = _highest_cosines(features.to(self.means.device), self.means)
        num_as_low = torch.searchsorted(self.cosines, cosines, right=True)
        return (num_as_low.double() + 1) / (len(self.cosines) + 1)

    def as_plain(self) -> dict[str, Tensor]:
        """Return tensors for a checkpoint."""
        return asdict(self)


def class_means(features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return the mean direction of the features (N, D) of each class, (K, D) float32, by class indices (N,)."""
    sums = torch.zeros(num_classes, features.shape[1], dtype=torch.float64)
    sums.index_add_(0, labels, F.normalize(features.double(), dim=1))
    return F.normalize(sums, dim=1).float()


def _highest_cosines(features: Tensor, means: Tensor) -> Tensor:
    return (F.normalize(features.double(), dim=1) @ means.double().T).amax(dim=1).float()


def num_averaged(num_images: int, num_classes: int) -> int:
    """Return at most how many of the training images are averaged."""
    return min(num_images, max(_LEAST_OF_CLASS * num_classes, MOST_IMAGES))


def some_of_each_class(labels: np.ndarray, num_classes: int) -> list[int]:
    """Return the indices of images to average, evenly spaced in each class; labels are class indices (N,)."""
    most = max(_LEAST_OF_CLASS, MOST_IMAGES // num_classes)
    chosen: list[int] = []
    for k in range(num_classes):
        of_class = np.flatnonzero(labels == k)
        num = min(most, len(of_class))
        chosen += of_class[np.arange(num) * len(of_class) // max(1, num)].tolist()
    return chosen


def read_familiarity(checkpoint: Mapping[str, Any], network: nn.Module) -> Familiarity | None:
    """Return the familiarity of a checkpoint, which may be untrusted; None if it has none.

    Raises:
        ValueError: It is not that of the network.
    """
    plain = checkpoint["finetune"].get("familiarity")
    if plain is None:
        return None
    shape = tuple(head(network).weight.shape)
    if plain["means"].shape != shape:
        raise ValueError(f"the checkpoint is damaged: its class means are not of shape {shape}")
    return Familiarity(**plain)


def check_none_below(limit: float, familiarity: Familiarity | None) -> None:
    """Check that images can be less familiar than a limit.

    Raises:
        ValueError: They cannot.
    """
    if not 0 <= limit <= 1:
        raise ValueError(f"none_below must be from 0 to 1, not {limit:g}")
    if familiarity is None:
        raise ValueError(
            "none_below: the model does not know which images are familiar. Exported files, ensembles, models for "
            "several labels, compiled ones, and those without validation images do not"
        )
    least = 1 / (len(familiarity.cosines) + 1)
    if limit <= least:
        num = counted(len(familiarity.cosines), "validation image")
        raise ValueError(
            f"none_below {limit:g}: with {num} no image is below {least:.4f}. Pass more, or fit with more of them"
        )


def logits_and_familiarity(
    forward: Callable[[Tensor], Tensor],
    images: Tensor,
    network: nn.Module,
    familiarity: Familiarity | None,
) -> tuple[Tensor, Tensor]:
    """Return the logits of images (B, K), and their familiarity (B,), which is empty if it is not known.

    Args:
        forward: Computes the logits by the network: itself, or the module that calls it with its precision.
        images: (B, 3, h, w) uint8 RGB.
        network: The network.
        familiarity: That of the network.
    """
    if familiarity is None:
        return forward(images), torch.empty(0)
    with recorded_features(head(network)) as features:
        logits = forward(images)
    return logits, familiarity.of(features[0])


@contextmanager
def recorded_features(linear: nn.Linear) -> Iterator[list[Tensor]]:
    """Record the inputs of a head (B, D) in forward passes of this thread."""
    features: list[Tensor] = []
    thread = threading.get_ident()  # another one may use the network at the same time

    def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if threading.get_ident() == thread:
            features.append(inputs[0].detach())

    handle = linear.register_forward_pre_hook(record)
    try:
        yield features
    finally:
        handle.remove()
