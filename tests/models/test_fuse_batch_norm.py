"""Fused batch norm, with which features are computed, computes the same."""

import pytest
import torch
from networks import few_blocks
from torch import nn

from finetune.models.backbones import build
from finetune.models.fx import fuse_batch_norm

# One of each way to be built: blocks with shortcuts, batch norm before, inverted residuals, branches, tokens.
SIZES = {
    "resnet18": 64,
    "densenet121": 64,
    "mobilenet_v2": 64,
    "googlenet": 64,
    "swin_t": 64,
    "vit": 32,  # one with few blocks
}


def learned(backbone: str) -> nn.Module:
    """A network with non-trivial batch norm, as after training."""
    torch.manual_seed(0)
    network = (few_blocks("vit") if backbone == "vit" else build(backbone, 4)).eval()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.running_mean, module.running_var, module.weight, module.bias):
                nn.init.uniform_(tensor, 0.5, 1.5)
    return network


@pytest.mark.slow
@pytest.mark.parametrize(
    "backbone", [b if b == "resnet18" else pytest.param(b, marks=pytest.mark.slow) for b in SIZES]
)
@torch.no_grad()
def test_folded_batch_norm_computes_the_same(backbone):
    network = learned(backbone).double()
    images = torch.rand(2, 3, SIZES[backbone], SIZES[backbone], dtype=torch.float64)
    expected, before = network(images), [p.clone() for p in network.parameters()]
    few = fuse_batch_norm(network)
    num = sum(isinstance(module, nn.BatchNorm2d) for module in network.modules())
    calls = sum(
        isinstance(few.get_submodule(n.target), nn.BatchNorm2d)
        for n in few.graph.nodes
        if n.op == "call_module"
    )
    assert calls < 0.6 * num or num == 0  # densenet's stand before, not after
    torch.testing.assert_close(few(images), expected, rtol=1e-10, atol=1e-10)
    # it is a copy
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.bias.sub_(0.1)
    # and so a difference would be seen
    assert num == 0 or not torch.allclose(few(images), network(images))


def test_a_part_that_can_not_be_followed_comes_back_as_it_is():
    class Bends(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    part = Bends().eval()
    assert fuse_batch_norm(part) is part


@pytest.mark.parametrize("backbone", ["timm/nest_tiny", "timm/hiera_tiny_224"])
def test_batch_norm_is_not_fused_where_a_network_can_not_be_followed(backbone):
    part = build(backbone, 2).eval()
    assert fuse_batch_norm(part) is part
