"""Heat maps: class activation maps add up to the logit, and lie over the image as the network sees it."""

import numpy as np
import pytest
import torch
from tiers import sweep

from finetune.inference.class_activation import class_activation, mean_activation
from finetune.models.backbones import build
from finetune.models.stages import head


def wake(network: torch.nn.Module) -> None:
    """Give an untrained network maps that are not all but zero: batch norm takes a batch's own statistics once."""
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = None
        network.train()(torch.randn(8, 3, 64, 64))
    network.eval()


@pytest.mark.parametrize(
    "name", sweep(["resnet18", "efficientnet_b0", "regnet_y_400mf"], quick=["resnet18"])
)
def test_it_is_the_head_place_by_place(name):
    torch.manual_seed(0)
    network = build(name, 3).eval()
    x = torch.randn(2, 3, 64, 64)
    classes = [2, 0]
    wake(network)
    found = class_activation(network, x, classes)
    assert (
        found is not None
        and found.shape == (2, 2, 2)
        and found.min() >= 0
        and found.max() == pytest.approx(1)
    )
    kept = []
    handle = [m for m in network.modules() if isinstance(m, torch.nn.AdaptiveAvgPool2d)][
        -1
    ].register_forward_hook(lambda module, given, out: kept.append(given[0]))
    with torch.no_grad():
        logits = network(x)
    handle.remove()
    linear = head(network)
    by_hand = torch.stack(
        [
            (linear.weight[k][:, None, None] * maps).sum(0)
            for k, maps in zip(classes, kept[0], strict=True)
        ]
    ).detach()
    # Averaged over all places and with the bias it is the logit: that is what makes it the class's own map.
    sums = by_hand.mean(dim=(1, 2)) + linear.bias[classes].detach()
    torch.testing.assert_close(sums, logits[range(2), classes], rtol=1e-4, atol=1e-4)
    positive = by_hand.clamp_min(0)
    np.testing.assert_allclose(found, positive / positive.amax(dim=(1, 2), keepdim=True), atol=1e-4)
    other = class_activation(network, x, [0, 2])
    assert not np.allclose(found, other)  # another class, another map


@pytest.mark.parametrize(
    "name",
    sweep(
        ["mobilenet_v3_small", "vit_b_16", "convnext_tiny", "lenet"],
        quick=("mobilenet_v3_small", "lenet"),
    ),
)
def test_other_networks_have_none(name):
    size = {"vit_b_16": 224, "lenet": 28}.get(name, 64)
    network = build(name, 3).eval()
    assert class_activation(network, torch.randn(1, 3, size, size), [0]) is None
    assert not any(module._forward_pre_hooks for module in network.modules())  # noqa: SLF001 (torch names no other)


def test_an_ensemble_s_is_the_mean_of_its_members_brought_to_one():
    torch.manual_seed(0)
    members = [build("resnet18", 3) for _ in range(2)]
    x = torch.randn(2, 3, 96, 96)
    classes = [2, 0]
    for member in members:
        wake(member)
    found = mean_activation([member.eval() for member in members], x, classes)
    first, second = (class_activation(member, x, classes) for member in members)
    mean = (first + second) / 2
    assert found is not None and found.shape == (2, 3, 3)
    np.testing.assert_allclose(found, mean / mean.max(axis=(1, 2), keepdims=True), rtol=1e-6)
    assert found.max(axis=(1, 2)) == pytest.approx(1)
    for wrong in (first, second, mean):  # the controls
        assert not np.allclose(found, wrong, atol=0.01)
