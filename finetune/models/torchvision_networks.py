"""The networks of torchvision, three small ones of finetune, and torchvision's weights; see `library.Library`."""

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn
from torchvision import models

from finetune.models.library import (
    DEFAULT,
    Description,
    ListedNetwork,
    Pretrained,
    Published,
    grey_levels,
)
from finetune.models.network_names import TORCHVISION, check_known
from finetune.models.weight_files import current_names
from finetune.system.files import one_at_a_time
from finetune.system.messages import WrongUsage

_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_IDENTITY = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
_SMALL_SIZE = 28
_LICENCE = "BSD-3-Clause code; ImageNet's terms"
_SWAG = "https://github.com/facebookresearch/SWAG/blob/main/LICENSE"  # CC BY-NC 4.0

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
    layers: dict[str, nn.Module] = {"size": FixedImageSize(_SMALL_SIZE), "grey": Grey()}
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
    layers: dict[str, nn.Module] = {"size": FixedImageSize(_SMALL_SIZE)}
    layers |= {"conv": nn.Conv2d(3, 32, 5), "relu1": nn.ReLU(), "pool": nn.MaxPool2d(2)}
    layers |= {"flatten": nn.Flatten(), "linear": nn.Linear(4608, 64), "relu2": nn.ReLU()}
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


def check_name(backbone: str) -> None:
    check_known(backbone)


def build(backbone: str, num_classes: int, image_size: int | None) -> nn.Module:
    check_known(backbone)
    if backbone in SMALL_NETWORKS:
        return SMALL_NETWORKS[backbone](num_classes)
    options: dict[str, Any] = {}
    if backbone in ("inception_v3", "googlenet"):
        # as torchvision does with weights: `transform_input` converts ImageNet's normalization to the one of these two
        options = {"aux_logits": False, "init_weights": False, "transform_input": True}
    side = _vit_size(backbone, image_size)
    if side:
        patch = int(backbone.rpartition("_")[2])
        if side % patch:
            raise WrongUsage(
                f"{backbone} does not support images of {side}x{side} pixels: image_size must be a multiple of the "
                f"side of its patches, {patch}"
            )
        options = {"image_size": side}
    return models.get_model(backbone, weights=None, num_classes=num_classes, **options)


def _vit_size(backbone: str, image_size: int | None) -> int | None:
    """Return the image size in pixels with which to build a ViT; None for other networks."""
    return (image_size or 224) if backbone.startswith("vit_") else None


def describe(backbone: str, weights: str = DEFAULT) -> Description:
    check_known(backbone)
    if backbone in SMALL_NETWORKS:
        return Description(backbone, *_IDENTITY, _SMALL_SIZE, {}, None)
    published = _published(backbone).get(weights)
    if published is None:
        return Description(weights, *_IMAGENET, 224, {}, None)
    size = published.transforms().crop_size[0]
    if backbone.startswith("vit_"):
        size = published.meta["min_size"][0]
    return Description(str(published), *_IMAGENET, size, {}, published.meta.get("license"))


def published(backbone: str, weights: str) -> Published | None:
    entry = _published(backbone).get(weights)
    if entry is None:
        return None
    file = _cached(entry)
    parts = urlsplit(entry.url)
    return Published(file if file.is_file() else None, f"{parts.scheme}://{parts.netloc}")


def _published(backbone: str) -> dict[str, Any]:
    """Return the weights that torchvision publishes for a network, by each of their names."""
    if backbone in SMALL_NETWORKS:
        return {}
    enum = models.get_model_weights(backbone)
    return {
        name: weight
        for key, weight in enum.__members__.items()
        for name in (key, f"{enum.__name__}.{key}")
    }


def _cached(entry: Any) -> Path:
    return Path(torch.hub.get_dir(), "checkpoints", entry.url.rpartition("/")[2])


def read_published(backbone: str, weights: str, image_size: int | None) -> Pretrained:
    entry = _published(backbone)[weights]
    side = _vit_size(backbone, image_size)
    if side and (own := entry.meta["min_size"][0]) != side:
        sizes = f"images of {own}x{own} pixels, not {side}x{side}"
        raise WrongUsage(f"{entry} is for {sizes}: image_size must be {own}")
    path = _cached(entry)
    digest = re.search(r"-([0-9a-f]{8,})\.", path.name)  # the beginning of the file's sha256
    # torchvision checks the hash of a file that it downloads, but not of a cached one
    if path.is_file() and digest:
        with path.open("rb") as file:
            if not hashlib.file_digest(file, "sha256").hexdigest().startswith(digest[1]):
                raise ValueError(
                    f"{path} is broken: its sha256 does not begin with {digest[1]}; delete it"
                )
    try:
        with nullcontext() if path.exists() else one_at_a_time(path):
            state = entry.get_state_dict(check_hash=True, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError) as error:  # torch.hub raises RuntimeError for a wrong hash
        other = "pass other weights with --weights FILE, null for none"
        hint = f"{other}, or: put {entry.url} at {path} by hand"
        raise OSError(f"cannot download {entry} ({error}); {hint}") from error
    preset = entry.transforms()
    return Pretrained(
        state=current_names(state),
        origin=str(entry),
        mean=grey_levels(preset.mean),
        std=grey_levels(preset.std),
    )


def convert(pretrained: Pretrained, backbone: str, image_size: int | None) -> Pretrained:
    return pretrained


def listed() -> Iterator[ListedNetwork]:
    for name in SMALL_NETWORKS:
        yield ListedNetwork(name, _SMALL_SIZE, "")
    for name in TORCHVISION:
        if name.startswith("squeezenet"):  # a fit refuses it
            continue
        about = describe(name)
        licence = "CC-BY-NC-4.0" if about.licence == _SWAG else about.licence
        yield ListedNetwork(name, about.image_size, licence or _LICENCE)


def num_parameters(backbone: str) -> int | None:
    if backbone in SMALL_NETWORKS:
        return sum(parameter.numel() for parameter in build(backbone, 1000, None).parameters())
    # published, since some networks cannot be built without memory for their weights
    return int(models.get_model_weights(backbone).DEFAULT.meta["num_params"])
