"""Building networks, their stages, reading and loading weights, the source head."""

from functools import cache

import pytest
import torch
from torch import nn
from torchvision import models

from finetune.models import build, head, head_name, stages
from finetune.weights import Pretrained

HEADS = {
    "resnet18": "fc",
    "resnet50": "fc",
    "mobilenet_v3_small": "classifier.3",
    "efficientnet_b0": "classifier.1",
    "convnext_tiny": "classifier.2",
    "vit_b_16": "heads.head",
}
SMALL = "mobilenet_v3_small"  # 1.5 million parameters: for what does not depend on the network
CATEGORIES = ["hot dog", "Cardigan", "cardigan", "ice_cream", "crane", "Crane", "paper-towel"]


@cache
def network(backbone: str) -> nn.Module:
    torch.manual_seed(0)
    return build(backbone, 3).eval()


def random_state(backbone: str, num_classes: int) -> dict[str, torch.Tensor]:
    """A source classifier's weights: like no initialisation, and a head of another size."""
    generator = torch.Generator().manual_seed(1)
    own = network(backbone).state_dict()
    state = {key: 1 + torch.rand(value.shape, generator=generator) for key, value in own.items()}
    name = HEADS[backbone]
    state[f"{name}.weight"] = torch.rand(num_classes, head(network(backbone)).in_features, generator=generator)
    state[f"{name}.bias"] = torch.rand(num_classes, generator=generator)
    return state


def pretrained(state: dict[str, torch.Tensor] | None = None, class_names: list[str] | None = CATEGORIES) -> Pretrained:
    return Pretrained(state or random_state(SMALL, 7), class_names, "the file")


@pytest.mark.parametrize("backbone", HEADS)
def test_head_is_the_only_difference_to_torchvision(backbone):
    with torch.device("meta"):
        ours, theirs = build(backbone, 3).state_dict(), models.get_model(backbone).state_dict()
    assert list(ours) == list(theirs)
    changed = {key for key in ours if ours[key].shape != theirs[key].shape}
    assert changed == {f"{HEADS[backbone]}.weight", f"{HEADS[backbone]}.bias"}


def test_head_is_xavier():
    layer = head(network("resnet18"))
    bound = (6 / (512 + 3)) ** 0.5  # Glorot and Bengio 2010, equation 16
    assert layer.weight.abs().max() <= bound
    assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)  # 1,536 uniform numbers: 2 %
    assert layer.bias.eq(0).all()


def test_unknown_backbone_names_the_nearest():
    with pytest.raises(ValueError, match=r"'resnet81'; did you mean .*resnet18"):
        build("resnet81", 2)
    with pytest.raises(ValueError, match="no torchvision classification network 'fcn_resnet50'"):
        build("fcn_resnet50", 2)  # torchvision has it, but it segments
    with pytest.raises(ValueError, match="squeezenet1_1 is not supported"):
        build("squeezenet1_1", 2)


# RegNets read numbers back while they are built, which the meta device does not allow: the smallest is built for real.
ALL = [n for n in models.list_models(module=models) if not n.startswith(("squeezenet", "regnet"))] + ["regnet_y_400mf"]


@pytest.mark.parametrize("backbone", ALL)
def test_stages_and_head_cover_every_network_without_overlap(backbone):
    with torch.device("cpu" if backbone.startswith("regnet") else "meta"):
        net = build(backbone, 3)
    parts = stages(net)
    inside = [name for part in (*parts, head_name(net)) for name, _ in named_below(net, part)]
    assert len(inside) == len(set(inside)) and len(parts) >= 3
    outside = {name for name, _ in net.named_parameters()} - set(inside)
    assert outside == ({"class_token", "encoder.pos_embedding"} if backbone.startswith("vit") else set())
    assert head(net).out_features == 3


def named_below(net: nn.Module, part: str) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in net.named_parameters() if name.startswith(part + ".")]


@pytest.mark.parametrize("backbone", HEADS)
def test_stages_are_in_the_order_of_the_forward_pass(backbone):
    net, order = network(backbone), []
    parts = {**stages(net), head_name(net): head(net)}
    hooks = [part.register_forward_hook(lambda *_, name=name: order.append(name)) for name, part in parts.items()]
    with torch.inference_mode():
        net(torch.rand(1, 3, *[224 if backbone == "vit_b_16" else 32] * 2))
    for hook in hooks:
        hook.remove()
    assert order == list(parts) and order[-1] == HEADS[backbone]


def test_stage_names():
    assert list(stages(network("resnet18"))) == ["conv1", "bn1", "layer1", "layer2", "layer3", "layer4"]
    assert list(stages(network(SMALL))) == [*(f"features.{i}" for i in range(13)), "classifier.0"]
    layers = [f"encoder.layers.encoder_layer_{i}" for i in range(12)]
    assert list(stages(network("vit_b_16"))) == ["conv_proj", *layers, "encoder.ln"]
