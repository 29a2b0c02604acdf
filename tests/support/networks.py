"""Networks of every kind, whole and without numbers."""

from functools import cache

import torch
from torch import nn
from torchvision import models

from finetune.models.backbones import build
from finetune.models.stages import head

BACKBONES = [
    "resnet18",
    "resnet50",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "convnext_tiny",
    "vit_b_16",
]
CATEGORIES = ["hot dog", "Cardigan", "cardigan", "ice_cream", "crane", "Crane", "paper-towel"]
SMALL = "mobilenet_v3_small"  # 1.5 million parameters: for what does not depend on the network
# RegNets read numbers back while they are built, which the meta device does not allow: the smallest is built for real.
ALL = [
    n for n in models.list_models(module=models) if not n.startswith(("squeezenet", "regnet"))
] + ["regnet_y_400mf"]
HEADS = {
    "resnet18": "fc",
    "resnet50": "fc",
    "mobilenet_v3_small": "classifier.3",
    "efficientnet_b0": "classifier.1",
    "convnext_tiny": "classifier.2",
    "vit_b_16": "heads.head",
}


def skeleton(backbone: str) -> nn.Module:
    """A network without numbers: enough where only names and flags count."""
    with torch.device("meta"):
        return build(backbone, 3)


def trainable(network: nn.Module) -> set[str]:
    return {name for name, parameter in network.named_parameters() if parameter.requires_grad}


@cache
def network(backbone: str) -> nn.Module:
    torch.manual_seed(0)
    return build(backbone, 3).eval()


def subnets() -> nn.Sequential:
    """Three small networks in a row, from (B, 1024) to logits (B, 100)."""
    return nn.Sequential(
        nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 100)
    )


def random_state(backbone: str, num_classes: int) -> dict[str, torch.Tensor]:
    """A source classifier's weights: like no initialisation, and a head of another size."""
    generator = torch.Generator().manual_seed(1)
    own = network(backbone).state_dict()
    state = {key: 1 + torch.rand(value.shape, generator=generator) for key, value in own.items()}
    name = HEADS[backbone]
    state[f"{name}.weight"] = torch.rand(
        num_classes, head(network(backbone)).in_features, generator=generator
    )
    state[f"{name}.bias"] = torch.rand(num_classes, generator=generator)
    return state
