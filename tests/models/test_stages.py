"""Stages in order, the head, and freezing from the stem on."""

import pytest
import torch
from networks import ALL, HEADS, SMALL, skeleton, trainable
from tiers import sweep
from timm.models import group_parameters
from timm_scenarios import FAMILIES
from torch import nn

from finetune.models.backbones import SMALL_NETWORKS, build
from finetune.models.stages import batch_norms, depths, freeze, head, head_name, stages

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


@pytest.mark.parametrize("backbone", HEADS)
def test_freeze_at_every_stage_and_all_but_the_head(backbone):
    network = skeleton(backbone)
    parts = stages(network)
    for count, last in enumerate([None, *parts]):
        network.requires_grad_(True)
        assert freeze(network, last) == list(parts.values())[:count]
        for i, part in enumerate(parts.values()):
            assert all(parameter.requires_grad == (i >= count) for parameter in part.parameters())
        assert all(parameter.requires_grad for parameter in head(network).parameters())
    network.requires_grad_(True)
    assert freeze(network, "backbone") == list(parts.values())
    assert trainable(network) == {f"{HEADS[backbone]}.weight", f"{HEADS[backbone]}.bias"}


@pytest.mark.parametrize(
    ("backbone", "last", "first_trained"),
    [
        ("mobilenet_v3_small", "features", "classifier.0"),
        ("efficientnet_b0", "features", "classifier.1"),
        ("vit_b_16", "encoder.layers", "encoder.ln"),
        ("vit_b_16", "encoder", "heads.head"),
        ("densenet121", "features", "classifier"),
    ],
)
def test_freeze_takes_the_name_of_several_stages(backbone, last, first_trained):
    network = skeleton(backbone)
    freeze(network, last)
    left = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    assert left[0].startswith(first_trained + ".")


def test_parameters_outside_any_stage_go_with_the_first():
    network = skeleton("vit_b_16")
    freeze(network, "conv_proj")
    stem = {"class_token", "encoder.pos_embedding", "conv_proj.weight", "conv_proj.bias"}
    assert {name for name, _ in network.named_parameters()} - trainable(network) == stem


@pytest.mark.parametrize("wrong", ["layer5", "layer", "fc", "relu", "layer1.0", ""])
def test_a_wrong_name_lists_the_right_ones(wrong):
    with pytest.raises(
        ValueError,
        match="the stages are conv1, bn1, layer1, layer2, layer3, layer4, and backbone is all",
    ):
        freeze(skeleton("resnet18"), wrong)


def test_batch_norms():
    # the stem's, two in each of 8 blocks, 3 shortcuts
    assert len(batch_norms(skeleton("resnet18"))) == 20
    assert batch_norms(skeleton("vit_b_16")) == []


@pytest.mark.parametrize("backbone", sweep([*ALL, *SMALL_NETWORKS], quick=FEW))
def test_stages_and_head_cover_every_network_without_overlap(backbone):
    with torch.device("cpu" if backbone.startswith("regnet") else "meta"):
        net = build(backbone, 3)
    parts = stages(net)
    inside = [name for part in (*parts, head_name(net)) for name, _ in named_below(net, part)]
    assert len(inside) == len(set(inside)) and len(parts) >= 2
    outside = {name for name, _ in net.named_parameters()} - set(inside)
    assert outside == (
        {"class_token", "encoder.pos_embedding"} if backbone.startswith("vit") else set()
    )
    assert head(net).out_features == 3


TIMM = {
    "resnet": ["conv1", "bn1", "layer1", "layer2", "layer3", "layer4"],
    "convnext": ["stem", "stages.0", "stages.1", "stages.2", "stages.3", "head.norm"],
    "efficientnet": ["conv_stem", "bn1", *(f"blocks.{i}" for i in range(5)), "conv_head", "bn2"],
    "mobilenetv4": [
        "conv_stem",
        "bn1",
        *(f"blocks.{i}" for i in range(5)),
        "conv_head",
        "norm_head",
    ],
    "vit": ["patch_embed", *(f"blocks.{i}" for i in range(3)), "norm"],
    "dinov2": ["patch_embed", *(f"blocks.{i}" for i in range(3)), "norm"],
    "focalnet": ["stem", "layers.0", "layers.1", "layers.2", "layers.3", "norm"],
}


@pytest.mark.parametrize("family", sweep(TIMM, quick=("resnet", "convnext", "vit")))
def test_stages_and_depths_of_timm_go_by_its_layers(family):
    network = skeleton(FAMILIES[family][0])
    assert list(stages(network)) == TIMM[family]
    inside = [
        name
        for part in (*stages(network), head_name(network))
        for name, _ in named_below(network, part)
    ]
    outside = {name for name, _ in network.named_parameters()} - set(inside)
    assert len(inside) == len(set(inside))
    assert outside == ({"cls_token", "pos_embed"} if family in ("vit", "dinov2") else set())
    frozen = freeze(network, TIMM[family][2])
    assert frozen == list(stages(network).values())[:3]
    left = {
        name
        for part in [*TIMM[family][3:], head_name(network)]
        for name, _ in named_below(network, part)
    }
    assert trainable(network) == left
    # Depths are those of timm's own layer decay.
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    groups = group_parameters(network, network.group_matcher(coarse=True), reverse=True)
    last = groups[f"{head_name(network)}.weight"]
    for stage, depth in depths(network).items():
        theirs = {
            last - groups[names[id(parameter)]] for parameter in stages(network)[stage].parameters()
        }
        # ours goes with its stage
        assert theirs == {depth} or (theirs == {0} and stage == "head.norm" and depth == 1)


def test_a_network_of_timm_without_layers_of_its_own_has_stages_all_the_same():
    network = skeleton("timm/poolformer_s12")
    assert list(stages(network)) == [
        "stem",
        "stages.0",
        "stages.1",
        "stages.2",
        "stages.3",
        "head.norm",
    ]
    assert depths(network) == {
        "stem": 5,
        "stages.0": 4,
        "stages.1": 3,
        "stages.2": 2,
        "stages.3": 1,
        "head.norm": 1,
    }


def named_below(net: nn.Module, part: str) -> list[tuple[str, nn.Parameter]]:
    return [
        (name, parameter)
        for name, parameter in net.named_parameters()
        if name.startswith(part + ".")
    ]


# By a function timm counts the layers of these.
BY_A_FUNCTION = [
    f"timm/{name}" for name in ("cait_xxs24_224", "inception_v3", "inception_resnet_v2")
]


@pytest.mark.parametrize("backbone", [*HEADS, *sweep(BY_A_FUNCTION, quick=["timm/inception_v3"])])
def test_stages_are_in_the_order_of_the_forward_pass(backbone):
    net, order = skeleton(backbone).eval(), []
    parts = {**stages(net), head_name(net): head(net)}
    for name, part in parts.items():
        part.register_forward_hook(lambda *_, name=name: order.append(name))
    net(torch.rand(1, 3, 224, 224, device="meta"))
    assert order == list(parts)


def test_positions_next_to_the_head_go_with_the_last_stage():
    network = skeleton("timm/resnet50_clip")
    *_, before, last = stages(network)
    for name, is_frozen in ((before, False), (last, True)):
        freeze(network, name)
        assert network.head.pos_embed.requires_grad != is_frozen
    assert trainable(network) == {"head.proj.weight", "head.proj.bias"}


def test_stage_names():
    assert list(stages(skeleton("resnet18"))) == [
        "conv1",
        "bn1",
        "layer1",
        "layer2",
        "layer3",
        "layer4",
    ]
    assert list(stages(skeleton(SMALL))) == [*(f"features.{i}" for i in range(13)), "classifier.0"]
    layers = [f"encoder.layers.encoder_layer_{i}" for i in range(12)]
    assert list(stages(skeleton("vit_b_16"))) == ["conv_proj", *layers, "encoder.ln"]
    assert list(stages(build("lenet", 3))) == ["conv1", "conv2", "linear"]


@pytest.mark.parametrize(
    ("backbone", "last"),
    [
        ("resnet18", "layer3"),
        ("timm/tf_efficientnet_lite0", "blocks.5"),
        ("timm/vit_small_patch16_224", "blocks.10"),
    ],
)
def test_another_networks_stage_is_answered_with_the_one_to_freeze_instead(backbone, last):
    network = skeleton(backbone)
    with pytest.raises(
        ValueError, match=rf"no stage 'layer9' .*: --model.freeze {last} freezes all but the last$"
    ):
        freeze(network, "layer9")
    freeze(network, last)
    assert trainable(network)  # the last stage and the head
    assert {name.partition(".")[0] for name in trainable(network)} != {
        head_name(network).partition(".")[0]
    }
