"""What an optimizer step does: the groups of parameters, the rates over a run, fused steps, the length of a fit."""

import copy
import math
from functools import cache, partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import BACKBONES, skeleton, trainable
from small_timm import FAMILIES
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from finetune.models.stages import freeze, head_name, stages
from finetune.settings.schema import TrainerSettings
from finetune.training.lr_schedulers import WarmupCosine
from finetune.training.optimizers import fuse, lay_out_gradients, param_groups
from finetune.training.run_length import settle_length, usual_epochs

known = cache(skeleton)  # of networks that each example thaws


def names_of(network: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in network.named_parameters()}


@given(
    backbone=st.sampled_from([name for name in BACKBONES if name != "resnet50"]),
    place=st.integers(0, 4),
    decay_norm_and_bias=st.booleans(),
)
def test_parameter_groups_are_a_partition_of_what_trains(backbone, place, decay_norm_and_bias):
    network = known(backbone).requires_grad_(True)
    freeze(network, [None, *stages(network), "backbone"][-1 if place == 4 else place])
    names = names_of(network)
    groups = param_groups(network, 10.0, decay_norm_and_bias)
    grouped = [names[id(parameter)] for group in groups for parameter in group["params"]]
    assert len(grouped) == len(set(grouped)) and set(grouped) == trainable(network)
    assert all(group["params"] for group in groups)
    assert len({group["name"] for group in groups}) == len(groups)
    heads = [names[id(p)] for g in groups if g["name"].startswith("head") for p in g["params"]]
    assert {name.rpartition(".")[0] for name in heads} == {head_name(network)}
    for group in groups:
        is_exempt = group["name"].endswith("_no_decay")
        assert group.get("weight_decay", "that of the optimizer") == (
            0.0 if is_exempt else "that of the optimizer"
        )
        assert not (is_exempt and decay_norm_and_bias)


# By number: ConvNeXt-T has 18 blocks, Swin-T 12, ViT-B one token and one table; Swin V2 has no table, but a scale and a
# small network that makes one (two weights and a bias, which is exempt as all are).
SCALES = {
    "convnext_tiny": {"layer_scale": 18},
    "swin_v2_t": {"logit_scale": 12, "cpb_mlp": 36},
    "vit_b_16": {"class_token": 1, "pos_embedding": 1},
    "resnet18": {},
}


@pytest.mark.parametrize("backbone", SCALES)
def test_weight_decay_spares_norms_biases_scales_and_positions(backbone):
    network = skeleton(backbone)
    names = names_of(network)
    split: dict[bool, list[str]] = {True: [], False: []}
    for group in param_groups(network, 10.0, decay_norm_and_bias=False):
        split[group.get("weight_decay") == 0.0] += [names[id(p)] for p in group["params"]]
    for what, num in SCALES[backbone].items():
        assert len([name for name in split[True] if what in name.split(".")]) == num
    # What decays are the weights of layers, and nothing else; the control: all of them do.
    layers = [
        f"{name}.weight"
        for name, module in network.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d)) and "cpb_mlp" not in name.split(".")
    ]
    layers += [name for name in names.values() if name.endswith("in_proj_weight")]  # of attention
    assert sorted(split[False]) == sorted(layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_networks_of_timm_decay_as_it_says(family):
    network = skeleton(FAMILIES[family][0])
    names = names_of(network)
    groups = param_groups(network, 1.0, decay_norm_and_bias=False)
    exempt = {names[id(p)] for g in groups if g.get("weight_decay") == 0.0 for p in g["params"]}
    own = set(getattr(network, "no_weight_decay", set)()) & set(names.values())
    assert exempt == {n for n, p in network.named_parameters() if p.ndim <= 1} | own


def two_groups() -> Optimizer:
    groups = [{"params": [torch.zeros(2, requires_grad=True)], "lr": lr} for lr in (0.1, 1.0)]
    return SGD(groups, momentum=0.9)


def rates(optimizer: Optimizer, scheduler: WarmupCosine, num_steps: int) -> list[list[float]]:
    """Learning rates of the groups at each optimizer step."""
    seen = []
    for _ in range(num_steps):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return seen


def test_warm_up_and_cosine_by_hand():
    optimizer = two_groups()
    seen = rates(optimizer, WarmupCosine(optimizer, total_steps=10, warmup=0.4, final=0.1), 12)
    # 4 steps of warm-up; then cos(0, 30, 60, 90, 120 and 150 degrees) between 1 and 0.1; 0.1 after the end.
    factors = [0.25, 0.5, 0.75, 1.0]
    factors += [0.55 + 0.45 * c for c in (1, math.sqrt(3) / 2, 1 / 2, 0, -1 / 2, -math.sqrt(3) / 2)]
    factors += [0.1, 0.1]
    for step, factor in enumerate(factors):
        assert seen[step] == pytest.approx([0.1 * factor, factor], rel=1e-12)


@given(total_steps=st.integers(1, 300), warmup=st.floats(0, 0.99), stop=st.integers(0, 300))
def test_no_step_has_a_rate_of_0_and_a_resumed_schedule_goes_on(total_steps, warmup, stop):
    optimizer = two_groups()
    full = rates(optimizer, WarmupCosine(optimizer, total_steps, warmup), total_steps)
    of_one = [rate for _, rate in full]
    assert min(of_one) > 0 and max(of_one) == 1.0 and optimizer.param_groups[1]["lr"] == 0.0
    stop = min(stop, total_steps)
    optimizer = two_groups()
    scheduler = WarmupCosine(optimizer, total_steps, warmup)
    rates(optimizer, scheduler, stop)
    states = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    optimizer = two_groups()
    scheduler = WarmupCosine(optimizer, total_steps, warmup)
    optimizer.load_state_dict(states[0])
    scheduler.load_state_dict(states[1])
    assert rates(optimizer, scheduler, total_steps - stop) == full[stop:]


@given(num_images=st.integers(0, 10**6))
def test_few_images_are_seen_more_often_within_limits(num_images):
    epochs = usual_epochs(num_images)
    seen = epochs * num_images
    assert 5 <= epochs <= 50 and usual_epochs(num_images + 1) <= epochs
    if 161 <= num_images <= 533:  # as many images in all
        assert 8_000 <= seen < 8_000 + num_images
    if 10_000 <= num_images <= 30_000:
        assert 150_000 - num_images < seen <= 150_000


@pytest.mark.parametrize(
    ("given", "epochs", "words"),
    [
        ({}, 15, "480 steps"),
        ({"accumulate_grad_batches": 3}, 15, "165 steps"),  # 11 of 32 batches, the last of two
        ({"limit_train_batches": 0.5}, 16, "256 steps"),  # whole batches
        ({"max_epochs": 3}, None, ""),
        ({"max_steps": 7}, None, ""),
    ],
)
def test_a_fit_without_a_length_has_the_usual_one(given, epochs, words):
    decided, reported = settle_length(TrainerSettings(**given), 1000, 32)
    assert decided == ({"trainer.max_epochs": epochs} if words else {})
    assert words in reported and bool(words) == bool(reported)


OPTIMIZERS = {
    "SGD": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "plain SGD": partial(SGD, lr=0.1),
    "Adam": partial(Adam, lr=0.01, weight_decay=0.01),
    "AdamW": partial(AdamW, lr=0.01, amsgrad=True),
}


def channels_last() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(8, 2)
    )
    return layers.double().to(memory_format=torch.channels_last)


def stepped(
    optimizer: Optimizer, network: nn.Module, is_turned: bool = False, is_laid_out: bool = False
) -> list[torch.Tensor]:
    """Take five steps on gradients of a fixed seed, `is_turned`: laid out unlike the weights from the third step on."""
    generator = torch.Generator().manual_seed(0)
    for step in range(5):
        for p in network.parameters():
            grad = torch.randn(p.shape, dtype=p.dtype, generator=generator)
            p.grad = (
                grad.contiguous() if is_turned and step > 1 else torch.empty_like(p).copy_(grad)
            )
        if is_laid_out:
            lay_out_gradients(optimizer)
        optimizer.step()
    return list(network.parameters())


def is_close(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.allclose(a, b, rtol=1e-13, atol=1e-13) for a, b in pairs)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("is_turned", [False, True])
def test_fused_optimizers_end_where_torch_s_plain_ones_do(name, is_turned):
    network, other, bare = (channels_last() for _ in range(3))
    optimizer = fuse(OPTIMIZERS[name](network.parameters()))
    assert all(group["fused"] for group in optimizer.param_groups)
    ours = stepped(optimizer, network, is_turned, is_laid_out=True)
    reference = OPTIMIZERS[name](other.parameters(), foreach=False)
    expected = stepped(reference, other, is_turned)
    assert is_close(ours, expected)
    if is_turned and "SGD" in name:  # the control: torch's fused step alone goes wrong
        alone = OPTIMIZERS[name](bare.parameters(), fused=True)
        assert not is_close(stepped(alone, bare, is_turned), expected)


def test_optimizer_state_of_another_shape_is_refused():
    weight = nn.Parameter(torch.ones(3, 4))
    optimizer = fuse(Adam([weight]))
    weight.grad = torch.ones(3, 4)
    optimizer.step()
    state = optimizer.state_dict()
    fuse(Adam([weight])).load_state_dict(state)  # the control
    state["state"][0]["exp_avg"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"exp_avg has the shape \(2,\)"):
        fuse(Adam([weight])).load_state_dict(state)
