"""Torchvision's classification networks: building one, its parts in order, its pretrained weights, its head.

A network is a torchvision module from normalised pictures (B, 3, H, W) to logits (B, K). Its last linear layer is the
*head*; what comes before is a row of *stages*, from the stem on. Both are known by their dotted module names.
"""

import difflib
from collections.abc import Iterable
from typing import cast

from torch import nn
from torchvision import models

# Modules that only hold a row of stages, in torchvision's naming.
_CONTAINERS = {"features", "encoder", "layers", "blocks", "trunk_output"}


def build(backbone: str, num_classes: int) -> nn.Module:
    """Make an untrained network of torchvision's with a Xavier-initialised head, as d2l.ai does for fine-tuning."""
    names = models.list_models(module=models)
    if backbone not in names:
        raise ValueError(f"there is no torchvision classification network {backbone!r}{did_you_mean(backbone, names)}")
    if backbone.startswith("squeezenet"):
        raise ValueError(f"{backbone} is not supported: it ends in a convolution, not in a linear head")
    # As torchvision does with weights: `transform_input` turns ImageNet's normalisation into that of these two.
    inception = {"aux_logits": False, "init_weights": False, "transform_input": True}
    options = inception if backbone in ("inception_v3", "googlenet") else {}
    network = models.get_model(backbone, weights=None, num_classes=num_classes, **options)
    fresh = nn.Linear(head(network).in_features, num_classes)
    nn.init.xavier_uniform_(fresh.weight)
    nn.init.zeros_(fresh.bias)
    network.set_submodule(head_name(network), fresh)
    return network


def head_name(network: nn.Module) -> str:
    """Dotted name of the last linear layer, like `fc` or `classifier.3`."""
    return [name for name, module in network.named_modules() if isinstance(module, nn.Linear)][-1]


def head(network: nn.Module) -> nn.Linear:
    """The last linear layer."""
    return cast(nn.Linear, network.get_submodule(head_name(network)))


def stages(network: nn.Module) -> dict[str, nn.Module]:
    """Parts of the network from the stem to the last one before the head, without overlap, by dotted name.

    Together with the head they hold every parameter but those that lie directly on a container (ViT's `class_token`
    and `encoder.pos_embedding`). Modules without parameters are left out.
    """
    last = head_name(network)
    found = {}

    def walk(container: nn.Module, prefix: str) -> None:
        for name, module in container.named_children():
            path = prefix + name
            if name in _CONTAINERS or last.startswith(path + "."):
                walk(module, path + ".")
            elif path != last and next(module.parameters(), None) is not None:
                found[path] = module

    walk(network, "")
    return found


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of an error message: the nearest valid names, or nothing."""
    near = difflib.get_close_matches(name, list(names), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""
