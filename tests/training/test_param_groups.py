"""Parameter groups."""

import itertools
import math

import pytest
import torch
from networks import BACKBONES, skeleton, trainable
from timm.models import group_parameters
from timm_scenarios import FAMILIES
from torch import nn

from finetune.models.backbones import build
from finetune.models.ensemble import Ensemble
from finetune.models.stages import freeze, head_name, stages
from finetune.system.messages import WrongUsage
from finetune.training.param_groups import merged, param_groups, scale_learning_rates

OPTIONS = list(itertools.product([1.0, 0.75], [True, False]))  # layer_decay, decay_norm_and_bias


@pytest.mark.parametrize("backbone", [backbone for backbone in BACKBONES if backbone != "resnet50"])
def test_groups_partition_what_trains(backbone):
    for last in (None, list(stages(skeleton(backbone)))[2], "backbone"):
        network = skeleton(backbone)
        freeze(network, last)
        before = trainable(network)
        names = {id(parameter): name for name, parameter in network.named_parameters()}
        for layer_decay, decay_norm_and_bias in OPTIONS:
            groups = param_groups(network, 10.0, layer_decay, decay_norm_and_bias)
            grouped = [names[id(parameter)] for group in groups for parameter in group["params"]]
            assert len(grouped) == len(set(grouped)) and set(grouped) == before == trainable(
                network
            )
            assert all(group["params"] for group in groups)
            assert len({group["name"] for group in groups}) == len(groups)
            for group in groups:
                exempt = {
                    p.ndim <= 1
                    or names[id(p)].rpartition(".")[2]
                    in ("layer_scale", "class_token", "pos_embedding")
                    for p in group["params"]
                }
                if not decay_norm_and_bias:
                    assert (
                        exempt
                        == {group["name"].endswith("_no_decay")}
                        == {group.get("weight_decay") == 0.0}
                    )
                else:
                    assert "weight_decay" not in group
            heads = [group for group in groups if group["name"].startswith("head")]
            assert {names[id(p)].rpartition(".")[0] for g in heads for p in g["params"]} == {
                head_name(network)
            }


@pytest.mark.parametrize("family", FAMILIES)
def test_networks_of_timm_train_at_the_rates_of_timm_and_decay_as_it_says(family):
    network = skeleton(FAMILIES[family][0])
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    groups = param_groups(network, 1.0, 0.5, decay_norm_and_bias=False)
    ours = {names[id(p)]: group["lr_multiplier"] for group in groups for p in group["params"]}
    layers = group_parameters(network, network.group_matcher(coarse=True), reverse=True)
    assert set(ours) == set(names.values())
    for name, rate in ours.items():
        theirs = 0.5 ** (max(layers.values()) - layers[name])
        # which goes with its stage
        assert rate == theirs or (name.startswith("head.norm.") and rate == 0.5)
    exempt = {
        names[id(p)]
        for group in groups
        if group.get("weight_decay") == 0.0
        for p in group["params"]
    }
    assert exempt == {n for n, p in network.named_parameters() if p.ndim <= 1} | network_names(
        network
    )


def test_positions_next_to_the_head_train_at_its_depth_s_rate_as_timm_has_it():
    network = skeleton("timm/resnet50_clip")
    groups = param_groups(network, 10.0, 0.5)
    (rate,) = {
        g["lr_multiplier"] for g in groups if any(p is network.head.pos_embed for p in g["params"])
    }
    layers = group_parameters(network, network.group_matcher(coarse=True), reverse=True)
    assert rate == 0.5 ** (layers["head.proj.weight"] - layers["head.pos_embed"]) == 1


def network_names(network: nn.Module) -> set[str]:
    return set(getattr(network, "no_weight_decay", set)()) & {
        name for name, _ in network.named_parameters()
    }


# By number: ConvNeXt-T has 18 blocks, Swin-T 12, ViT-B one token and one table; Swin V2 has no table, but a scale and a
# small network that makes one (two weights and a bias, which is exempt as all are).
SCALES = {
    "convnext_tiny": {"layer_scale": 18},
    "swin_t": {"relative_position_bias_table": 12},
    "swin_v2_t": {"logit_scale": 12, "cpb_mlp": 36},
    "vit_b_16": {"class_token": 1, "pos_embedding": 1},
    "maxvit_t": {"relative_position_bias_table": 22},
    "resnet18": {},
}


@pytest.mark.parametrize("backbone", SCALES)
def test_scales_and_positions_do_not_decay(backbone):
    network = skeleton(backbone)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    groups = param_groups(network, 10.0, decay_norm_and_bias=False)
    in_decay, exempt = (
        [
            names[id(p)]
            for group in groups
            for p in group["params"]
            if (group.get("weight_decay") == 0.0) == is_exempt
        ]
        for is_exempt in (False, True)
    )
    for what, num in SCALES[backbone].items():
        assert len([name for name in exempt if what in name.split(".")]) == num
        assert not [name for name in in_decay if what in name.split(".")]
    # What decays are the weights of layers, and nothing else; the control: all of them do.
    layers = [
        f"{name}.weight"
        for name, module in network.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d)) and "cpb_mlp" not in name.split(".")
    ]
    layers += [name for name in names.values() if name.endswith("in_proj_weight")]  # of attention
    assert sorted(in_decay) == sorted(layers)


def test_two_groups_without_layer_decay():
    network = skeleton("resnet18")
    groups = param_groups(network, 10.0)
    assert [(group["name"], group["lr_multiplier"]) for group in groups] == [
        ("backbone", 1.0),
        ("head", 10.0),
    ]
    assert [len(group["params"]) for group in groups] == [60, 2]
    groups = param_groups(network, 10.0, decay_norm_and_bias=False)
    assert [(group["name"], len(group["params"])) for group in groups] == [
        ("backbone", 20),  # convolutions
        ("backbone_no_decay", 40),  # scale and shift of 20 batch norms
        ("head", 1),
        ("head_no_decay", 1),
    ]


def test_layer_decay_by_hand():
    groups = param_groups(skeleton("resnet18"), 10.0, layer_decay=0.5)
    assert {group["name"]: group["lr_multiplier"] for group in groups} == {
        "conv1": 1 / 32,
        "bn1": 1 / 32,  # the stem's norm
        "layer1": 1 / 16,
        "layer2": 1 / 8,
        "layer3": 1 / 4,
        "layer4": 1 / 2,
        "head": 10.0,
    }
    groups = param_groups(skeleton("vit_b_16"), 1.0, layer_decay=0.5)
    by_name = {group["name"]: group["lr_multiplier"] for group in groups}
    # 12 blocks at depths 12 to 1, the final norm with the last of them, the embedding before the first.
    assert by_name["encoder.ln"] == by_name["encoder.layers.encoder_layer_11"] == 1 / 2
    assert by_name["encoder.layers.encoder_layer_0"] == 2**-12
    assert by_name["conv_proj"] == 2**-13
    # class token and positions with the stem
    assert len(groups[0]["params"]) == 4 and groups[0]["name"] == "conv_proj"


@pytest.mark.parametrize("backbone", ["resnet18", "vit_b_16"])
def test_an_ensemble_s_groups_are_those_of_its_members_together(backbone):
    members = [skeleton(backbone) for _ in range(3)]
    for member in members:
        freeze(member, list(stages(member))[1])
    network = Ensemble(members)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    for options in OPTIONS:
        groups = merged([param_groups(member, 10.0, *options) for member in members])
        grouped = [names[id(p)] for group in groups for p in group["params"]]
        assert len(grouped) == len(set(grouped)) and set(grouped) == trainable(network) != set(
            names.values()
        )
        for i, member in enumerate(members):
            alone = param_groups(member, 10.0, *options)
            own = [
                [p for p in group["params"] if names[id(p)].startswith(f"members.{i}.")]
                for group in groups
            ]
            assert [[*map(id, params)] for params in own] == [
                [*map(id, group["params"])] for group in alone
            ]
            for together, group in zip(groups, alone, strict=True):
                assert {**together, "params": None} == {**group, "params": None}


def test_rates_reach_the_weights():
    network = build("resnet18", 3)
    freeze(network, "layer1")
    before = {name: parameter.clone() for name, parameter in network.named_parameters()}
    optimizer = torch.optim.SGD(
        param_groups(network, 10.0, decay_norm_and_bias=False), lr=0.5, weight_decay=0.0
    )
    scale_learning_rates(optimizer)
    scale_learning_rates(optimizer)  # a second call changes nothing
    assert [(group["name"], group["lr"]) for group in optimizer.param_groups] == [
        ("backbone", 0.5),
        ("backbone_no_decay", 0.5),
        ("head", 5.0),
        ("head_no_decay", 5.0),
    ]
    assert not any("lr_multiplier" in group for group in optimizer.param_groups)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    for name, parameter in network.named_parameters():
        rate = (
            5.0
            if name.startswith("fc.")
            else 0.0
            if name.startswith(("conv1.", "bn1.", "layer1."))
            else 0.5
        )
        assert parameter.equal(before[name] - rate), name


def test_rates_out_of_range():
    network = skeleton("resnet18")
    for layer_decay in (0.0, 1.5):
        with pytest.raises(
            WrongUsage, match=f"layer_decay must be above 0 and at most 1, not {layer_decay}"
        ):
            param_groups(network, 10.0, layer_decay)
    for multiplier in (0.0, math.nan, math.inf):
        with pytest.raises(
            WrongUsage, match=f"head_lr_multiplier must be above 0 and finite, not {multiplier}"
        ):
            param_groups(network, multiplier)
