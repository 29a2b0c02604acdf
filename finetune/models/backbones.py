"""Building classification networks of torchvision and timm.

A network is a module from normalized images (B, 3, H, W) to logits (B, K). Its last linear layer is the *head*. The
layers before it form a sequence of *stages* that begins with the stem (`stages`). Head and stages have dotted module
names.
"""

import torch
from torch import nn

from finetune.models import timm_networks, torchvision_networks
from finetune.models.library import DEFAULT, Library
from finetune.models.network_names import is_timm
from finetune.models.stages import head, head_name
from finetune.models.torchvision_networks import SMALL_NETWORKS

LIBRARIES: tuple[Library, ...] = (torchvision_networks, timm_networks)


def library_of(backbone: str) -> Library:
    """Return the library that has a network."""
    return timm_networks if is_timm(backbone) else torchvision_networks


def is_local(backbone: str) -> bool:
    """Return whether the default weights of a network are in the cache of torch or of the Hugging Face hub."""
    published = library_of(backbone).published(backbone, DEFAULT)
    return published is not None and published.file is not None


def build(backbone: str, num_classes: int, image_size: int | None = None) -> nn.Module:
    """Build an untrained network. Except in `SMALL_NETWORKS` its head is Xavier-initialized, as in d2l.ai.

    Args:
        backbone: The name of the network. The names of timm's networks begin with `timm/`.
        num_classes: K.
        image_size: Side of the images in pixels, for networks with position embeddings.

    Raises:
        WrongUsage: The network does not exist, has no linear head, or does not support this size.
    """
    network = library_of(backbone).build(backbone, num_classes, image_size)
    if backbone in SMALL_NETWORKS:
        return network
    new_head = nn.Linear(head(network).in_features, num_classes)
    nn.init.xavier_uniform_(new_head.weight)
    nn.init.zeros_(new_head.bias)
    network.set_submodule(head_name(network), new_head)
    return network


def skeleton(backbone: str) -> nn.Module:
    """Build a network for two classes, without memory for its parameters if possible."""
    try:
        with torch.device("meta"):
            return build(backbone, 2)
    except (NotImplementedError, RuntimeError):  # RegNets read values of tensors when built
        return build(backbone, 2)


def normalization(backbone: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of pixels in [0, 1] with which a network normalizes images by default."""
    about = library_of(backbone).describe(backbone)
    return about.mean, about.std
