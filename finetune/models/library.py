"""What libraries of networks have in common: torchvision (`torchvision_networks`) and timm (`timm_networks`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

DEFAULT = "DEFAULT"  # names the published weights of a network


class Description(NamedTuple):
    """The description of weights.

    Attributes:
        name: Name of the weights, for messages.
        mean: Mean of the pixels of each channel, in [0, 1].
        std: Standard deviation of the same pixels.
        image_size: Side in pixels of the images that the network was trained on.
        preparation: How images were prepared, as settings of the data; empty if the user decides.
        licence: The licence of the weights; None if it is not stated.
    """

    name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: int
    preparation: dict[str, Any]
    licence: str | None


class Published(NamedTuple):
    """Published weights.

    Attributes:
        file: The file in the cache of torch or of the Hugging Face hub; None if it is not there.
        server: The address of the server that has them; "" if requests are forbidden.
    """

    file: Path | None
    server: str


class ListedNetwork(NamedTuple):
    """A network with its default weights.

    Attributes:
        name: Value of `model.backbone`. Those of timm begin with `timm/` and name their weights.
        image_size: Side in pixels of the images that the weights were trained on.
        licence: Licence of the weights; "" if it is not stated.
    """

    name: str
    image_size: int
    licence: str


@dataclass(frozen=True)
class Pretrained:
    """Weights as read, before they are loaded into a network.

    Attributes:
        state: The state dict.
        origin: The file or the name of the weights, for messages.
        mean: Mean of the pixels of each channel (3, 1, 1) in grey levels, if the weights state a normalization.
        std: Standard deviation of the same pixels (3, 1, 1).
        licence: For weights of an earlier fit: the licence of the weights from which that fit started.
    """

    state: dict[str, Tensor]
    origin: str
    mean: Tensor | None = None
    std: Tensor | None = None
    licence: str | None = None


class Library(Protocol):
    """The functions of a module for a library of networks."""

    def check_name(self, backbone: str) -> None:
        """Raise `WrongUsage` if there is no such network."""

    def build(self, backbone: str, num_classes: int, image_size: int | None) -> nn.Module:
        """Return an untrained network whose head is its last linear layer.

        Raises:
            WrongUsage: The network does not exist, has no linear head, or does not support this size.
        """

    def describe(self, backbone: str, weights: str = DEFAULT) -> Description:
        """Return the description of published weights, or of the weights in a folder of timm.

        Raises:
            WrongUsage: The network does not exist, or the folder is of another one.
            ValueError: The weights need a preparation of images that is not supported.
        """

    def published(self, backbone: str, weights: str) -> Published | None:
        """Return published weights; None if a name means none."""

    def read_published(self, backbone: str, weights: str, image_size: int | None) -> Pretrained:
        """Read published weights, and download them if necessary.

        Raises:
            WrongUsage: They are for another image size.
            OSError: They cannot be downloaded.
        """

    def convert(self, pretrained: Pretrained, backbone: str, image_size: int | None) -> Pretrained:
        """Return the weights of a file with the names and shapes of the current network.

        Raises:
            ValueError: They are weights of another network.
        """

    def listed(self) -> Iterator[ListedNetwork]:
        """Yield the networks that a fit can train."""

    def num_parameters(self, backbone: str) -> int | None:
        """Return the number of parameters with a head of 1,000 classes; None for a network that a fit refuses."""


def grey_levels(values: Sequence[float]) -> Tensor:
    """Return a value of each channel in [0, 1] as a buffer of an image classifier: (3, 1, 1), from 0 to 255."""
    return 255 * torch.tensor(values).view(3, 1, 1)
