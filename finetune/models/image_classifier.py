"""The network of a classifier with its normalization: uint8 RGB images in, logits out.

Training, prediction, export and serving use this one module. It is a plain `nn.Module`, without a trainer.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from finetune.models import stages
from finetune.models.backbones import build, normalization
from finetune.models.ensemble import Ensemble, check

# Shapes: B images, M members of an ensemble, K classes.

# The buffer of the loss, which lies in checkpoints next to the image classifier.
_OF_TRAINING = "class_weight"


def normalize(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return images (B, 3, H, W) as a network expects them, in the dtype of `mean`."""
    return (images.to(mean.dtype) - mean) / std


class ImageClassifier(nn.Module):
    """Normalizes images and computes their logits with a network.

    Args:
        network: From normalized images (B, 3, H, W) to logits (B, K); an `Ensemble` in training mode to (M, B, K).
        mean: Of the pixels that the network expects, (3, 1, 1), in grey levels.
        std: Their standard deviation, likewise.

    Attributes:
        eval_forward: What computes the logits in eval mode, such as a faster form of the network; None for the
            network itself.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.network = network
        self.eval_forward: Callable[[Tensor], Tensor] | None = None
        self.register_buffer("mean", mean.clone())
        self.register_buffer("std", std.clone())

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, K) of images (B, 3, H, W) uint8 RGB; of an ensemble in training mode (M, B, K)."""
        forward: Callable[[Tensor], Tensor] = self.network
        if not self.training and self.eval_forward is not None:
            forward = self.eval_forward
        return forward(self.normalized(images)).to(self.mean.dtype)

    def normalized(self, images: Tensor) -> Tensor:
        """Return what the network takes of images (B, 3, H, W) uint8 RGB."""
        return normalize(images, self.mean, self.std).contiguous(memory_format=torch.channels_last)

    @property
    def members(self) -> list[nn.Module]:
        """The networks of an ensemble; else the one network."""
        return [*self.network.members] if isinstance(self.network, Ensemble) else [self.network]

    def freeze(self, last: str | None) -> list[nn.Module]:
        """Freeze the stages of each network up to a named one and return the frozen modules; see `stages.freeze`."""
        return [stage for network in self.members for stage in stages.freeze(network, last)]

    def load_checkpoint_state(self, state: Mapping[str, Any]) -> None:
        """Load the weights and the normalization from the state dict of a checkpoint.

        Raises:
            RuntimeError: Names or shapes differ.
        """
        # A shallow copy keeps torch's version numbers of modules, without which MNASNet does not load.
        own: Any = copy.copy(state)
        own.pop(_OF_TRAINING, None)
        self.load_state_dict(own)


def build_image_classifier(
    backbone: str,
    num_classes: int,
    image_size: int | None = None,
    *,
    members: int = 1,
    head_init: str = "xavier",
) -> ImageClassifier:
    """Build an untrained image classifier with the normalization of its backbone, in channels_last order.

    Args:
        backbone: The name of the network, as `build` takes it.
        num_classes: K.
        image_size: Side of the images in pixels, for networks that hold a position of each patch.
        members: Number of networks; more than one are an `Ensemble`.
        head_init: How the heads start, which has to differ between members.

    Raises:
        WrongUsage: There is no such network, or no ensemble of so many with heads that start so.
    """
    check(members, head_init)
    networks = [build(backbone, num_classes, image_size) for _ in range(members)]
    network = networks[0] if members == 1 else Ensemble(networks)
    mean, std = (255 * torch.tensor(value).view(3, 1, 1) for value in normalization(backbone))
    return ImageClassifier(network.to(memory_format=torch.channels_last), mean, std)
