"""Networks of every kind, complete or without weights."""

from functools import cache
from typing import Any

import torch
from torch import nn
from torchvision import models
from torchvision.models import convnext, efficientnet, mobilenetv3, vision_transformer
from torchvision.models.resnet import BasicBlock, ResNet

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


class NarrowResNet(ResNet):
    """ResNet-18 with a quarter of the channels after the stem: a sixteenth of the weights to add up and to send."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(BasicBlock, [2, 2, 2, 2])
        self.fc = nn.Linear(128, num_classes)

    def _make_layer(
        self, block: Any, planes: int, *arguments: Any, **options: Any
    ) -> nn.Sequential:
        return super()._make_layer(block, planes // 4, *arguments, **options)


def few_blocks(backbone: str) -> nn.Module:
    """A network for 3 classes of one of torchvision's classes, with few blocks of few channels."""
    if backbone == "efficientnet":
        blocks = [
            efficientnet.MBConvConfig(expand, kernel, stride, *channels, 2, 1.0, 1.0)
            for expand, kernel, stride, channels in ((1, 3, 1, (8, 8)), (6, 5, 2, (8, 16)))
        ]
        return efficientnet.EfficientNet(blocks, 0.2, num_classes=3, last_channel=64)
    if backbone == "mobilenet":
        rows = [
            mobilenetv3.InvertedResidualConfig(8, 3, 8, 8, True, "RE", 2, 1, 1.0),
            mobilenetv3.InvertedResidualConfig(8, 5, 24, 16, True, "HS", 2, 1, 1.0),
        ]
        return mobilenetv3.MobileNetV3(rows, 32, num_classes=3)
    if backbone == "convnext":
        shapes = [convnext.CNBlockConfig(16, 32, 2), convnext.CNBlockConfig(32, None, 2)]
        return convnext.ConvNeXt(shapes, 0.1, num_classes=3)
    if backbone == "resnet":
        return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=3)
    assert backbone == "vit"
    return vision_transformer.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=3)


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
