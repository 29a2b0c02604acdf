"""The stages of a network: their order, freezing them (`--freeze`), and a head over several of them."""

import copy
import pickle
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import ALL, HEADS, NarrowResNet, skeleton, trainable
from promise import promise
from small_timm import FAMILIES
from tiers import sweep
from torch import Tensor, nn

from finetune.features.image_features import fuse_batch_norm
from finetune.inference.class_activation import class_activation
from finetune.models.backbones import SMALL_NETWORKS, build
from finetune.models.image_classifier import build_image_classifier
from finetune.models.library import Pretrained
from finetune.models.multi_stage import most_stages, use_stages
from finetune.models.stages import freeze, head, head_name, stages, without_head
from finetune.models.weights import load_weights
from finetune.system.messages import WrongUsage

FEW = (
    "resnet18",
    "mobilenet_v2",
    "efficientnet_b0",
    "densenet121",
    "googlenet",
    "vgg11",
    "vit_b_16",
    "swin_t",
    *SMALL_NETWORKS,
)
OFTEN = ("resnet18", "mobilenet_v3_small", "vit_b_16")


def names_below(network: nn.Module, *parts: str) -> list[str]:
    """The names of parameters in these modules, once for each module that has them."""
    names = [name for name, _ in network.named_parameters()]
    return [name for part in parts for name in names if name.startswith(part + ".")]


@pytest.mark.parametrize("backbone", sweep([*ALL, *SMALL_NETWORKS], quick=FEW))
def test_stages_and_head_cover_every_network_without_overlap(backbone):
    with torch.device("cpu" if backbone.startswith("regnet") else "meta"):
        network = build(backbone, 3)
    parts = stages(network)
    inside = names_below(network, *parts, head_name(network))
    assert len(inside) == len(set(inside)) and len(parts) >= 2
    outside = {name for name, _ in network.named_parameters()} - set(inside)
    positions = {"class_token", "encoder.pos_embedding"} if backbone.startswith("vit") else set()
    assert outside == positions and head(network).out_features == 3


# By a function timm counts the layers of these.
BY_A_FUNCTION = [
    f"timm/{name}" for name in ("cait_xxs24_224", "inception_v3", "inception_resnet_v2")
]


@pytest.mark.parametrize(
    "backbone", sweep([*HEADS, *BY_A_FUNCTION], quick=[*OFTEN, "timm/inception_v3"])
)
def test_stages_are_in_the_order_of_the_forward_pass(backbone):
    network, order = skeleton(backbone).eval(), []
    parts = {**stages(network), head_name(network): head(network)}
    for name, part in parts.items():
        part.register_forward_hook(lambda *_, name=name: order.append(name))
    network(torch.rand(1, 3, 224, 224, device="meta"))
    assert order == list(parts)


TIMM = {
    "resnet": ["conv1", "bn1", "layer1", "layer2", "layer3", "layer4"],
    "convnext": ["stem", *(f"stages.{i}" for i in range(4)), "head.norm"],
    "efficientnet": ["conv_stem", "bn1", *(f"blocks.{i}" for i in range(5)), "conv_head", "bn2"],
    "mobilenetv4": [
        *("conv_stem", "bn1", *(f"blocks.{i}" for i in range(5)), "conv_head", "norm_head")
    ],
    "vit": ["patch_embed", *(f"blocks.{i}" for i in range(3)), "norm"],
    "dinov2": ["patch_embed", *(f"blocks.{i}" for i in range(3)), "norm"],
    "focalnet": ["stem", *(f"layers.{i}" for i in range(4)), "norm"],
}


@pytest.mark.parametrize("family", sweep(TIMM, quick=("resnet", "convnext", "vit")))
def test_stages_of_timm_go_by_its_layers(family):
    network = skeleton(FAMILIES[family][0])
    assert list(stages(network)) == TIMM[family]
    inside = names_below(network, *stages(network), head_name(network))
    outside = {name for name, _ in network.named_parameters()} - set(inside)
    assert len(inside) == len(set(inside))
    assert outside == ({"cls_token", "pos_embed"} if family in ("vit", "dinov2") else set())
    frozen = freeze(network, TIMM[family][2])
    assert frozen == list(stages(network).values())[:3]
    left = names_below(network, *TIMM[family][3:], head_name(network))
    assert trainable(network) == set(left)


known = cache(skeleton)  # each example thaws it


@given(backbone=st.sampled_from(sorted(HEADS)), place=st.integers(0, 40))
def test_freeze_takes_all_stages_up_to_the_named_one(backbone, place):
    network = known(backbone).requires_grad_(True)
    parts = stages(network)
    place = min(place, len(parts))
    last = [None, *parts][place]
    assert freeze(network, last) == list(parts.values())[:place]
    for i, part in enumerate(parts.values()):
        assert all(parameter.requires_grad == (i >= place) for parameter in part.parameters())
    assert all(parameter.requires_grad for parameter in head(network).parameters())


@pytest.mark.parametrize("backbone", sweep(HEADS, quick=OFTEN))
def test_freeze_backbone_leaves_the_head(backbone):
    network = skeleton(backbone)
    assert freeze(network, "backbone") == list(stages(network).values())
    assert trainable(network) == {f"{HEADS[backbone]}.weight", f"{HEADS[backbone]}.bias"}


@pytest.mark.parametrize(
    ("backbone", "last", "first_trained"),
    [
        ("efficientnet_b0", "features", "classifier.1"),
        ("vit_b_16", "encoder.layers", "encoder.ln"),
        ("densenet121", "features", "classifier"),
    ],
)
def test_freeze_takes_the_name_of_several_stages(backbone, last, first_trained):
    network = skeleton(backbone)
    freeze(network, last)
    left = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    assert left[0].startswith(first_trained + ".")


def test_freeze_takes_parameters_outside_any_stage_with_the_one_next_to_them():
    network = skeleton("vit_b_16")
    freeze(network, "conv_proj")
    stem = {"class_token", "encoder.pos_embedding", "conv_proj.weight", "conv_proj.bias"}
    assert {name for name, _ in network.named_parameters()} - trainable(network) == stem
    network = skeleton("timm/resnet50_clip")  # whose positions are those of its pooling
    *_, before, last = stages(network)
    for name, is_frozen in ((before, False), (last, True)):
        freeze(network, name)
        assert network.head.pos_embed.requires_grad != is_frozen
    assert trainable(network) == {"head.proj.weight", "head.proj.bias"}


# the modules whose outputs are pooled, before the head's own input
POOLED = {
    "narrow": ["layer2", "layer3"],
    "timm/test_resnet": ["layer2", "layer3"],
    "timm/test_convnext": ["stages.1", "stages.2"],
    # a layer lies between its last stage and its head
    "timm/test_efficientnet": ["blocks.2", "blocks.3", "blocks.4"],
}
X = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def plain(name: str) -> nn.Module:
    """An untrained network whose batch norm has the statistics of a batch: all stages differ from 0."""
    torch.manual_seed(0)
    network = NarrowResNet(3) if name == "narrow" else build(name, 3)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        network.train()(torch.randn(8, 3, 64, 64))
    return network.eval()


def wide(name: str) -> nn.Module:
    network = plain(name)
    use_stages(network, 3, name)
    return network.eval()


@torch.no_grad()
def outputs(network: nn.Module, modules: list[str]) -> list[Tensor]:
    """What some modules give."""
    parts: list[Tensor] = []
    for name in modules:
        network.get_submodule(name).register_forward_hook(lambda _, given, out: parts.append(out))
    network(X)
    return parts


@torch.no_grad()
def features(network: nn.Module) -> Tensor:
    """What the head takes."""
    parts: list[Tensor] = []
    handle = head(network).register_forward_pre_hook(lambda _, given: parts.append(given[0]))
    network(X)
    handle.remove()
    return parts[0]


@promise("solved-head")
@pytest.mark.parametrize("name", POOLED)
def test_a_head_over_stages_takes_the_means_of_their_outputs(name):
    network, narrow = wide(name), plain(name)
    means = [out.mean(dim=(2, 3)) for out in outputs(plain(name), POOLED[name])]
    expected = torch.cat([*means, features(narrow)], dim=1)
    torch.testing.assert_close(features(network), expected)
    assert head(network).in_features == expected.shape[1]
    # all but the head is the plain network
    shapes = {key: value.shape for key, value in network.state_dict().items()}
    before = {key: value.shape for key, value in narrow.state_dict().items()}
    weight = f"{head_name(narrow)}.weight"
    assert shapes.pop(weight) != before.pop(weight) and shapes == before
    assert stages(network).keys() == stages(narrow).keys()
    moved = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(1)
    load_weights(moved, Pretrained(narrow.state_dict(), "plain weights"))
    assert torch.equal(features(moved), features(network))
    load_weights(narrow, Pretrained(network.state_dict(), "wide weights"))


@pytest.mark.parametrize("name", POOLED)
def test_a_head_over_stages_survives_copies_pickles_and_traces(name):
    network = wide(name)
    with torch.no_grad():
        logits = network(X)
        others = {
            "copied": copy.deepcopy(network),
            "pickled": pickle.loads(pickle.dumps(network)),
            "fused": fuse_batch_norm(network),
        }
        for how, other in others.items():
            torch.testing.assert_close(other(X), logits, rtol=1e-4, atol=1e-5, msg=how)
        torch.testing.assert_close(without_head(network)(X), features(network))
        head(others["copied"]).weight.zero_()
        torch.testing.assert_close(network(X), logits)


def evidence(network: nn.Module, classes: list[int]) -> Tensor:
    """The evidence at each place of the last maps, from the modules' outputs."""
    parts = outputs(copy.deepcopy(network), ["layer2", "layer3", "layer4"])
    weights = head(network).weight.detach()[classes].split([out.shape[1] for out in parts], 1)
    total = torch.zeros(2, 2, 2)
    for out, weight in zip(parts, weights, strict=True):
        places = (out * weight[:, :, None, None]).sum(1)
        side = out.shape[-1] // 2
        total += places.unflatten(1, (2, side)).unflatten(3, (2, side)).mean(dim=(2, 4))
    return total


def test_class_activation_maps_of_all_stages_add_up_to_the_logit():
    network = wide("narrow")
    with torch.no_grad():  # all evidence is positive: none is cut off
        nn.init.uniform_(head(network).weight, 0.1, 1.0)
        logits = network(X)
    maps = class_activation(network, X, [0, 1])
    assert maps is not None and maps.shape == (2, 2, 2)
    means = torch.from_numpy(maps).mean(dim=(1, 2))
    ratios = (logits[[0, 1], [0, 1]] - head(network).bias[[0, 1]]).detach() / means
    torch.testing.assert_close(ratios, evidence(network, [0, 1]).amax(dim=(1, 2)))
    with torch.no_grad():  # the control: one stage less
        head(network).weight[:, :32] = 0
    assert not torch.allclose(evidence(network, [0, 1]).amax(dim=(1, 2)), ratios)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("resnet18", 4),
        ("timm/tf_efficientnet_lite0", 4),
        ("mobilenet_v3_small", 1),
        ("timm/test_vit", 1),
    ],
)
def test_networks_that_do_not_support_head_stages_say_so(name, most):
    assert most_stages(skeleton(name)) == most
    if most == 1:
        with pytest.raises(WrongUsage, match=f"{name} .* last stage only"):
            build_image_classifier(name, 2, head_stages=3)
