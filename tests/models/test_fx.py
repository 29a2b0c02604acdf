"""A network cut in two computes what it did whole, and nothing random or learning is on the frozen side."""

import pytest
import torch
from networks import skeleton
from tiers import sweep
from timm_scenarios import FAMILIES
from torch import nn
from torch.nn import functional as F

from finetune.models.backbones import build
from finetune.models.fx import fuse_batch_norm, split_frozen
from finetune.models.stages import freeze, stages

# One of each way to be built: plain rows, blocks with shortcuts, branches, dropout before the head, tokens.
SIZES = {"resnet18": 64, "mobilenet_v2": 64, "alexnet": 64, "densenet121": 64, "googlenet": 64, "vit_b_32": 224}
NETWORKS = {**SIZES, "swin_t": 64, "lenet": 28, "resnet18_small": 28}


def frozen_to(network: nn.Module, last: str) -> list[nn.Module]:
    """Put a network into training mode, frozen as in a run."""
    network.requires_grad_(True).train()
    frozen = freeze(network, last)
    for module in frozen:
        module.eval()
    return frozen


@pytest.mark.parametrize("backbone", sweep(NETWORKS, quick=("resnet18", "mobilenet_v2", "alexnet", "lenet")))
@torch.no_grad()
def test_both_parts_together_are_the_network(backbone):
    network = build(backbone, 4)
    names = list(stages(network))
    images = torch.rand(2, 3, NETWORKS[backbone], NETWORKS[backbone])
    for last in (names[0], names[len(names) // 2], "backbone"):
        parts = split_frozen(network, frozen_to(network, last))
        assert parts is not None
        network.eval()
        assert torch.equal(parts[1](parts[0](images)), network(images))


@pytest.mark.parametrize("family", sweep(FAMILIES, quick=("resnet", "vit")))
@torch.no_grad()
def test_networks_of_timm_can_be_cut_behind_every_stage(family):
    backbone, image_size = FAMILIES[family]
    network = build(backbone, 4, image_size).eval()
    images = torch.rand(2, 3, image_size, image_size)
    names = list(stages(network))
    for last in (names[0], names[1], names[len(names) // 2], names[-1]):
        parts = split_frozen(network, freeze(network, last))
        assert parts is not None
        assert torch.equal(parts[1](parts[0](images)), network(images))


@torch.no_grad()
def test_what_can_not_be_followed_can_not_be_cut():
    class Choosy(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 1), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(self.a(x).mean((2, 3)) if x.sum() > 0 else x)

    network = Choosy()
    assert split_frozen(network, [network.a]) is None


def test_weights_are_shared_and_all_that_learn_are_in_the_rest():
    network = skeleton("resnet18")
    first, rest = split_frozen(network, frozen_to(network, "layer3"))
    learning = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert {name for name, _ in rest.named_parameters()} == learning
    assert not any(parameter.requires_grad for parameter in first.parameters())
    own = dict(network.named_parameters())
    assert all(own[name] is parameter for name, parameter in rest.named_parameters())


@pytest.mark.parametrize(
    ("backbone", "last"), [("mobilenet_v2", "backbone"), ("alexnet", "backbone"), ("alexnet", "features")]
)
def test_dropout_is_in_the_rest_and_still_random(backbone, last):
    network = build(backbone, 4)
    first, rest = split_frozen(network, frozen_to(network, last))
    assert not any(isinstance(module, nn.Dropout) for module in first.modules())
    images = torch.rand(2, 3, 64, 64)
    features = first(images)
    assert torch.equal(features, first(images))
    assert not torch.equal(rest(features), rest(features))


def test_dropout_that_drops_nothing_does_not_keep_the_rest_large():
    network = skeleton("vit_b_32")  # its dropout, of rate 0, comes before all layers
    _, rest = split_frozen(network, frozen_to(network, "backbone"))
    assert sum(parameter.numel() for parameter in rest.parameters()) == 3 * 768 + 3


class Dropping(nn.Module):
    """Drops by a function, as GhostNet does: torch.fx takes down whether it trains, once and for all."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.conv, self.head, self.rate = nn.Conv2d(3, 4, 1), nn.Linear(4, 4), rate

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.conv(images).mean((2, 3))
        return self.head(F.dropout(x, p=self.rate, training=self.training))


@pytest.mark.parametrize(("rate", "is_cut"), [(0.5, False), (0.0, True)])
def test_a_network_that_drops_by_a_function_is_left_whole(rate, is_cut):
    network = Dropping(rate).train()
    assert (split_frozen(network, freeze(network, "backbone")) is not None) == is_cut


class Pooling(nn.Module):
    """Has positions beside its head, as CLIP's pooling does."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.value, self.proj = nn.Parameter(torch.ones(4)), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.value(x + self.positions))


@pytest.mark.parametrize(("last", "is_cut"), [("0", False), ("backbone", True)])
def test_positions_that_learn_are_not_on_the_frozen_side(last, is_cut):
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), Pooling())
    assert (split_frozen(network, freeze(network, last)) is not None) == is_cut


class Shortcut(nn.Module):
    """The head sees the pictures themselves, too: nothing frozen stands between."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(images).mean((2, 3))) + images.mean((1, 2, 3))[:, None]


def test_a_network_with_another_way_around_is_left_whole():
    network = Shortcut()
    assert split_frozen(network, freeze(network, "backbone")) is None


@pytest.mark.parametrize("backbone", ["timm/nest_tiny", "timm/hiera_tiny_224"])
def test_batch_norm_is_not_fused_where_a_network_can_not_be_followed(backbone):
    part = build(backbone, 2).eval()
    assert fuse_batch_norm(part) is part
