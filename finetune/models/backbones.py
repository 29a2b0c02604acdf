"""Classification networks, torchvision's, timm's and three small ones: building one.

A network is a module from normalised pictures (B, 3, H, W) to logits (B, K). Its last linear layer is the *head*; what
comes before is a row of *stages*, from the stem on (`stages`). Both are known by their dotted module names.
"""

from collections import OrderedDict
from typing import Any, TypeVar

from torch import Tensor, nn
from torchvision import models

from finetune.models.stages import head, head_name
from finetune.models.timm_backbones import build_timm, describe, is_timm, timm_name
from finetune.system.messages import WrongUsage, did_you_mean

# Mean and standard deviation of the pixels that a network wants to see, in [0, 1]: ImageNet's for torchvision's.
Normalization = tuple[tuple[float, ...], tuple[float, ...]]
_IMAGENET: Normalization = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_AS_THEY_ARE: Normalization = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)

_Network = TypeVar("_Network", bound=nn.Module)


class PictureSize(nn.Module):
    """Lets pictures of one size pass: the first linear layer behind has room for no other."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[2:] != (self.side, self.side):
            raise ValueError(
                f"this network takes pictures of {self.side}x{self.side} pixels, not {images.shape[2]}x"
                f"{images.shape[3]}: image_size must be {self.side}"
            )
        return images


class Grey(nn.Module):
    """RGB (B, 3, H, W) to its mean (B, 1, H, W)."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean(dim=1, keepdim=True)


def lenet(num_classes: int) -> nn.Sequential:
    """The network that `data_parallel` trains by hand, for grey pictures of 28x28.

    Source: d2l.ai, "Training on Multiple GPUs".
    """
    layers: dict[str, nn.Module] = {"size": PictureSize(28), "grey": Grey()}
    layers |= {"conv1": nn.Conv2d(1, 20, 3), "relu1": nn.ReLU(), "pool1": nn.AvgPool2d(2)}
    layers |= {"conv2": nn.Conv2d(20, 50, 5), "relu2": nn.ReLU(), "pool2": nn.AvgPool2d(2)}
    layers |= {"flatten": nn.Flatten(), "linear": nn.Linear(800, 128), "relu3": nn.ReLU()}
    return _normal(nn.Sequential(OrderedDict(layers, head=nn.Linear(128, num_classes))))


def resnet18_small(num_classes: int) -> models.ResNet:
    """ResNet-18 for small grey pictures: its first layer is 3x3 with stride 1, and no pooling follows.

    Source: d2l.ai, "Concise Implementation for Multiple GPUs"; the blocks are torchvision's: no bias in convolutions,
    batch norm in shortcuts.
    """
    network = models.resnet18(num_classes=num_classes)
    network.conv1 = nn.Sequential(Grey(), nn.Conv2d(1, 64, 3, padding=1, bias=False))
    network.maxpool = nn.Identity()
    return _normal(network)


def small_cnn(num_classes: int) -> nn.Sequential:
    """One convolution and two linear layers, for RGB pictures of 28x28, with torch's own initialisation."""
    layers: dict[str, nn.Module] = {
        "size": PictureSize(28),
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


OWN = {network.__name__: network for network in (lenet, resnet18_small, small_cnn)}


def _normal(network: _Network) -> _Network:
    """Draw all weights from N(0, 0.01), as the book does: 0.01 is the standard deviation."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return network


def normalization(backbone: str) -> Normalization:
    """Return mean and standard deviation of the pixels, in [0, 1], that a network wants to see where no weights say."""
    if is_timm(backbone):
        return describe(backbone)[1:3]
    return _AS_THEY_ARE if backbone in OWN else _IMAGENET


def vit_size(backbone: str, image_size: int | None) -> int | None:
    """Return the side in pixels of the pictures that a ViT of torchvision's is made for; None for other networks."""
    return (image_size or 224) if backbone.startswith("vit_") else None


def check_name(backbone: str) -> None:
    """Make sure that there is a network of this name.

    Raises:
        WrongUsage: There is none, or it has no linear head.
    """
    if is_timm(backbone):
        timm_name(backbone)
        return
    names = [*OWN, *models.list_models(module=models)]
    if backbone not in names:
        raise WrongUsage(
            f"there is no classification network {backbone!r}{did_you_mean(backbone, names)}"
        )
    if backbone.startswith("squeezenet"):
        raise WrongUsage(
            f"{backbone} is not supported: it ends in a convolution, not in a linear head"
        )


def build(backbone: str, num_classes: int, image_size: int | None = None) -> nn.Module:
    """Make an untrained network: one of `OWN`, or another with a Xavier head, as d2l.ai does for fine-tuning.

    Args:
        backbone: Its name; that of timm's begins with `timm/`.
        num_classes: K.
        image_size: Side of the pictures in pixels, where the network holds a position of each patch.

    Raises:
        WrongUsage: There is no such network, it has no linear head, or can't be had for this size.
    """
    if backbone in OWN:
        return OWN[backbone](num_classes)
    if is_timm(backbone):
        return _with_xavier_head(build_timm(backbone, num_classes, image_size), num_classes)
    check_name(backbone)
    # As torchvision does with weights: `transform_input` turns ImageNet's normalisation into that of these two.
    inception = {"aux_logits": False, "init_weights": False, "transform_input": True}
    options: dict[str, Any] = inception if backbone in ("inception_v3", "googlenet") else {}
    if side := vit_size(backbone, image_size):
        if side % (patch := int(backbone.rpartition("_")[2])):
            raise WrongUsage(
                f"{backbone} can't be had for pictures of {side}x{side} pixels: its patches have {patch}, of which "
                "image_size must be a multiple"
            )
        options = {"image_size": side}
    return _with_xavier_head(
        models.get_model(backbone, weights=None, num_classes=num_classes, **options), num_classes
    )


def _with_xavier_head(network: nn.Module, num_classes: int) -> nn.Module:
    fresh = nn.Linear(head(network).in_features, num_classes)
    nn.init.xavier_uniform_(fresh.weight)
    nn.init.zeros_(fresh.bias)
    network.set_submodule(head_name(network), fresh)
    return network
