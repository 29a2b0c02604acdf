"""The network of a classifier with its normalization: uint8 RGB images in, logits out.

Training, prediction, export and serving all use this module. It is a plain `nn.Module` and needs no Trainer.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from finetune.models import stages
from finetune.models.backbones import build, library_of, normalization
from finetune.models.ensemble import Ensemble
from finetune.models.library import grey_levels
from finetune.models.multi_stage import use_stages
from finetune.settings.schema import LabelKind

# Shapes: B images, K classes.

# A buffer of the loss. Checkpoints store it next to the weights of the image classifier.
_LOSS_BUFFER = "class_weight"


def normalize(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return images (B, 3, H, W) as a network expects them, in the dtype of `mean`."""
    return (images.to(mean.dtype) - mean) / std


class ImageClassifier(nn.Module):
    """Normalizes images and computes their logits with a network.

    Args:
        network: From normalized images (B, 3, H, W) to logits (B, K).
        mean: Mean of the pixels of each channel (3, 1, 1), in grey levels from 0 to 255.
        std: Standard deviation of the same pixels (3, 1, 1), in grey levels.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", mean.clone())
        self.register_buffer("std", std.clone())

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, K) of images (B, 3, H, W) uint8 RGB."""
        logits: Tensor = self.network(self.normalized(images))
        return logits.to(self.mean.dtype)

    def normalized(self, images: Tensor) -> Tensor:
        """Return the input of the network for images (B, 3, H, W) uint8 RGB."""
        return normalize(images, self.mean, self.std).contiguous(memory_format=torch.channels_last)

    @property
    def members(self) -> list[nn.Module]:
        """The networks of an ensemble; a single network as a list of one."""
        return [*self.network.members] if isinstance(self.network, Ensemble) else [self.network]

    def freeze(self, last: str | None) -> list[nn.Module]:
        """Freeze the stages of each network up to `last` and return the frozen modules; see `stages.freeze`."""
        return [stage for network in self.members for stage in stages.freeze(network, last)]

    def load_checkpoint_state(
        self, state: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the weights and the normalization from the state dict of a checkpoint, as `load_state_dict` does.

        Raises:
            RuntimeError: Names or shapes differ.
        """
        # A shallow copy keeps torch's version numbers of modules. MNASNet does not load without them.
        copied: Any = copy.copy(state)
        copied.pop(_LOSS_BUFFER, None)
        return self.load_state_dict(copied, strict, assign)


def build_image_classifier(
    backbone: str,
    num_classes: int,
    image_size: int | None = None,
    *,
    members: int = 1,
    label_kind: LabelKind = "single",
    head_stages: int = 1,
) -> ImageClassifier:
    """Build an untrained image classifier with the normalization of its backbone, in channels_last order.

    Args:
        backbone: The name of the network; see `build`.
        num_classes: K.
        image_size: Side of the images in pixels, for networks with position embeddings.
        members: Number of networks. More than one form an `Ensemble`.
        label_kind: Whether members are averaged after a softmax or a sigmoid.
        head_stages: Number of the last stages whose pooled features the heads take.

    Raises:
        WrongUsage: The network does not exist or does not support `head_stages`.
    """
    networks = [build(backbone, num_classes, image_size) for _ in range(members)]
    for network in networks:
        use_stages(network, head_stages, backbone)
    network = networks[0] if members == 1 else Ensemble(networks, label_kind)
    mean, std = map(grey_levels, normalization(backbone))
    return ImageClassifier(network.to(memory_format=torch.channels_last), mean, std)


def check_first_pass(
    model: ImageClassifier, backbone: str, image_size: int
) -> dict[nn.Module, int]:
    """Check that a network takes images of a size. The network stays unchanged.

    Args:
        model: The image classifier, on the CPU.
        backbone: The name of its network, for the error message.
        image_size: Side of the images in pixels.

    Returns:
        For each batch norm the number of values per channel that it gets from one image.

    Raises:
        ValueError: The network does not take images of this size.
    """
    network = model.network
    num_values: dict[nn.Module, int] = {}

    def count(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        num_values[norm] = inputs[0].numel() // inputs[0].size(1)

    handles = [norm.register_forward_pre_hook(count) for norm in stages.batch_norms(network)]
    modes = [(module, module.training) for module in network.modules()]
    try:
        with torch.no_grad():
            network.eval()(torch.zeros(1, 3, image_size, image_size, dtype=model.mean.dtype))
    except Exception as error:  # networks raise errors of many types if an image is too small
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{backbone} does not support images of {image_size}x{image_size} pixels: {reason}; "
            f"its weights are for --size {library_of(backbone).describe(backbone).image_size}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes:
            module.training = mode
    return num_values
