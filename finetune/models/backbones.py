"""Building classification networks: those of torchvision and timm, and three small ones.

A network is a module from normalized images (B, 3, H, W) to logits (B, K). Its last linear layer is the *head*. The
layers before it form a sequence of *stages* that begins with the stem (`stages`). Head and stages have dotted module
names.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torchvision import models

from finetune.models.network_names import check_known
from finetune.models.stages import head, head_name
from finetune.models.timm_backbones import build_timm, describe, is_timm, timm_name
from finetune.system.messages import WrongUsage

# Mean and standard deviation of pixels in [0, 1] with which a network normalizes images.
Normalization = tuple[tuple[float, ...], tuple[float, ...]]
_IMAGENET: Normalization = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_IDENTITY: Normalization = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)

_Network = TypeVar("_Network", bound=nn.Module)


class FixedImageSize(nn.Module):
    """Returns images unchanged, and raises an error if they have another size than a later linear layer supports."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[2:] != (self.side, self.side):
            height, width = images.shape[2:]
            size = f"{height}" if height == width else f"{height}x{width}"
            raise ValueError(f"image_size must be {self.side}, not {size}")
        return images


class Grey(nn.Module):
    """Averages the channels of RGB images, from (B, 3, H, W) to (B, 1, H, W)."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean(dim=1, keepdim=True)


def lenet(num_classes: int) -> nn.Sequential:
    """LeNet, the network that `parity.data_parallel` trains, for grey images of 28x28 pixels.

    Source: d2l.ai, "Training on Multiple GPUs".
    """
    layers: dict[str, nn.Module] = {"size": FixedImageSize(28), "grey": Grey()}
    layers |= {"conv1": nn.Conv2d(1, 20, 3), "relu1": nn.ReLU(), "pool1": nn.AvgPool2d(2)}
    layers |= {"conv2": nn.Conv2d(20, 50, 5), "relu2": nn.ReLU(), "pool2": nn.AvgPool2d(2)}
    layers |= {"flatten": nn.Flatten(), "linear": nn.Linear(800, 128), "relu3": nn.ReLU()}
    return _normal(nn.Sequential(OrderedDict(layers, head=nn.Linear(128, num_classes))))


def resnet18_small(num_classes: int) -> models.ResNet:
    """ResNet-18 for small grey images: its first layer is 3x3 with stride 1, without max pooling after it.

    Source: d2l.ai, "Concise Implementation for Multiple GPUs". The blocks are those of torchvision: convolutions have
    no bias, and shortcuts have batch norm.
    """
    network = models.resnet18(num_classes=num_classes)
    network.conv1 = nn.Sequential(Grey(), nn.Conv2d(1, 64, 3, padding=1, bias=False))
    network.maxpool = nn.Identity()
    return _normal(network)


def small_cnn(num_classes: int) -> nn.Sequential:
    """One convolution and two linear layers, for RGB images of 28x28 pixels, with torch's default initialization."""
    layers: dict[str, nn.Module] = {
        "size": FixedImageSize(28),
        "conv": nn.Conv2d(3, 32, 5),
        "relu1": nn.ReLU(),
    }
    layers |= {
        "pool": nn.MaxPool2d(2),
        "flatten": nn.Flatten(),
        "linear": nn.Linear(4608, 64),
        "relu2": nn.ReLU(),
    }
    return nn.Sequential(OrderedDict(layers, head=nn.Linear(64, num_classes)))


SMALL_NETWORKS = {network.__name__: network for network in (lenet, resnet18_small, small_cnn)}


def _normal(network: _Network) -> _Network:
    """Draw all weights from a normal distribution with standard deviation 0.01, as d2l.ai does."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return network


def normalization(backbone: str) -> Normalization:
    """Return the normalization that a network uses if its weights do not state one."""
    if is_timm(backbone):
        return describe(backbone)[1:3]
    return _IDENTITY if backbone in SMALL_NETWORKS else _IMAGENET


def grey_levels(values: Sequence[float]) -> Tensor:
    """Return a value of each channel in [0, 1] as a buffer of an image classifier: (3, 1, 1), from 0 to 255."""
    return 255 * torch.tensor(values).view(3, 1, 1)


def vit_size(backbone: str, image_size: int | None) -> int | None:
    """Return the image size in pixels with which to build a ViT of torchvision; None for other networks."""
    return (image_size or 224) if backbone.startswith("vit_") else None


def check_name(backbone: str) -> None:
    """Check that a network of this name exists.

    Raises:
        WrongUsage: It does not exist, or it has no linear head.
    """
    check_known(backbone)
    if is_timm(backbone):
        timm_name(backbone)


def build(backbone: str, num_classes: int, image_size: int | None = None) -> nn.Module:
    """Build an untrained network. Except in `SMALL_NETWORKS` its head is Xavier-initialized, as in d2l.ai.

    Args:
        backbone: The name of the network. The names of timm's networks begin with `timm/`.
        num_classes: K.
        image_size: Side of the images in pixels, for networks with position embeddings.

    Raises:
        WrongUsage: The network does not exist, has no linear head, or does not support this size.
    """
    if backbone in SMALL_NETWORKS:
        return SMALL_NETWORKS[backbone](num_classes)
    if is_timm(backbone):
        return _with_xavier_head(build_timm(backbone, num_classes, image_size), num_classes)
    check_name(backbone)
    # As torchvision does with weights: `transform_input` converts ImageNet's normalization to the one of these two.
    inception = {"aux_logits": False, "init_weights": False, "transform_input": True}
    options: dict[str, Any] = inception if backbone in ("inception_v3", "googlenet") else {}
    if side := vit_size(backbone, image_size):
        if side % (patch := int(backbone.rpartition("_")[2])):
            raise WrongUsage(
                f"{backbone} does not support images of {side}x{side} pixels: image_size must be a multiple of the "
                f"side of its patches, {patch}"
            )
        options = {"image_size": side}
    return _with_xavier_head(
        models.get_model(backbone, weights=None, num_classes=num_classes, **options), num_classes
    )


def skeleton(backbone: str) -> nn.Module:
    """Build a network for two classes, without memory for its parameters if possible."""
    try:
        with torch.device("meta"):
            return build(backbone, 2)
    except (NotImplementedError, RuntimeError):  # RegNets read values of tensors when built
        return build(backbone, 2)


def _with_xavier_head(network: nn.Module, num_classes: int) -> nn.Module:
    new_head = nn.Linear(head(network).in_features, num_classes)
    nn.init.xavier_uniform_(new_head.weight)
    nn.init.zeros_(new_head.bias)
    network.set_submodule(head_name(network), new_head)
    return network
