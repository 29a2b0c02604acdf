"""Dropout and stochastic depth by image: the same on any number of devices, and a fair draw."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from promise import promise
from timm.layers import DropPath
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701 - its only place
from torchvision.ops import StochasticDepth

from finetune.data.samplers import rank_range
from finetune.models.backbones import build
from finetune.training.dropout import (
    PerImageDropout,
    PerImageStochasticDepth,
    make_per_image,
    set_keys,
)

NOISE = {
    "values": (nn.Dropout(0.3), (12, 5, 4, 4)),
    "features": (nn.Dropout(0.3, inplace=True), (12, 40)),
    "channels": (nn.Dropout2d(0.3), (12, 7, 3, 3)),
    "rows": (StochasticDepth(0.3, "row"), (12, 2, 3, 3)),
    "batch": (StochasticDepth(0.5, "batch"), (12, 2, 3, 3)),
    "timm's rows": (DropPath(0.3), (12, 2, 3, 3)),
    "timm's rows, unscaled": (DropPath(0.3, scale_by_keep=False), (12, 6, 5)),
}


def noisy(layer: nn.Module, x: Tensor, images: Tensor, step: int = 0, seed: int = 0) -> Tensor:
    """What a network of one layer gives in a training step."""
    network = nn.Sequential(copy.deepcopy(layer)).train()
    set_keys(make_per_image(network), seed, step, images)
    return network(x.clone())


def draw_by_the_place_in_the_batch(monkeypatch):
    of_images = set_keys

    def of_places(layers, seed, step, images):
        of_images(layers, seed, step, torch.arange(len(images)))

    monkeypatch.setitem(globals(), "set_keys", of_places)


@promise("random-numbers", controls=[draw_by_the_place_in_the_batch])
@given(
    kind=st.sampled_from(sorted(NOISE)),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    images=st.lists(st.integers(0, 2**31), min_size=12, max_size=12, unique=True),
    world_size=st.integers(1, 16),  # of 16 devices, four have no image
    bad=st.sets(st.integers(0, 11), max_size=10),  # images that could not be decoded
)
def test_each_device_draws_its_rows_of_one_dropout_mask(kind, dtype, images, world_size, bad):
    layer, shape = NOISE[kind]
    images = torch.tensor(images)
    x = torch.ones(shape, dtype=dtype)
    full = noisy(layer, x, images)
    assert full.dtype == dtype
    assert torch.equal(full != 0, noisy(layer, x.double(), images) != 0)
    ranks = [rank_range(12, rank, world_size) for rank in range(world_size)]
    rows = [slice(part.start, part.stop) for part in ranks]
    assert torch.equal(full, torch.cat([noisy(layer, x[own], images[own]) for own in rows]))
    good = torch.tensor([i for i in range(12) if i not in bad])
    assert torch.equal(full[good], noisy(layer, x[good], images[good]))


@pytest.mark.parametrize("kind", NOISE)
def test_a_dropout_mask_depends_on_image_step_and_seed(kind):
    layer, shape = NOISE[kind]
    x = torch.ones(36, *shape[1:])
    images = torch.arange(36)
    first = noisy(layer, x, images)
    by_step = [noisy(layer, x, images, step=step) for step in range(1, 9)]
    by_seed = [noisy(layer, x, images, seed=seed) for seed in range(1, 9)]
    for others in (by_step, by_seed):
        assert not all(torch.equal(first, other) for other in others)
    if kind != "batch":
        assert not torch.equal(first, noisy(layer, x, images + 36))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.8, 1.0])
def test_as_many_are_dropped_as_torch_would_and_the_rest_makes_up_for_it(p):
    x = torch.ones(200, 100, dtype=torch.float64)
    for layer in (nn.Dropout(p), StochasticDepth(p, "row")):
        values = noisy(layer, x, torch.arange(200))
        share_dropped = float((values == 0).double().mean())
        num = 20_000 if isinstance(layer, nn.Dropout) else 200
        # five deviations of a fair draw
        assert abs(share_dropped - p) <= 5 * (p * (1 - p) / num) ** 0.5
        kept = values[values != 0]
        torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - p or 1)))


def test_dropout_masks_know_nothing_of_each_other():
    """Over steps, layers, images and values that follow each other: means of ±1 within five deviations of chance."""
    network = nn.ModuleList(nn.Dropout(0.5) for _ in range(4)).train()
    layers = make_per_image(network)
    masks = []
    for step in range(8):
        set_keys(layers, 0, step, torch.arange(32))
        masks.append(torch.stack([layer(torch.ones(32, 128)) for layer in network]))
    signs = torch.stack(masks).double() - 1  # 0 and 2 become -1 and 1
    assert signs.shape == (8, 4, 32, 128) and signs.abs().unique().tolist() == [1]
    assert abs(float(signs.mean())) <= 5 / signs.numel() ** 0.5
    for d in range(4):
        before, after = signs.narrow(d, 0, signs.size(d) - 1), signs.narrow(d, 1, signs.size(d) - 1)
        assert abs(float((before * after).mean())) <= 5 / before.numel() ** 0.5


def test_a_dropout_layer_in_several_places_draws_anew_in_each():
    twice = nn.Dropout(0.5)
    network = nn.Sequential(twice, nn.Flatten(), twice)
    layers = make_per_image(network)
    assert len(layers) == 1 and network[0] is network[2]
    x, seen = torch.ones(4, 200), []
    for _ in range(2):
        set_keys(layers, 0, 0, torch.arange(4))
        seen.append((twice(x), twice(x)))
    assert torch.equal(seen[0][0], seen[1][0]) and torch.equal(seen[0][1], seen[1][1])
    is_same = (seen[0][0] == 0) == (seen[0][1] == 0)
    assert float(is_same.double().mean()) == pytest.approx(0.5, abs=0.09)  # 5 deviations


class Own(nn.Dropout):
    """Of somebody else, which may do more."""


def test_only_training_steps_draw_by_image():
    network = nn.Sequential(
        nn.Linear(4, 4),
        nn.Dropout(0.5),
        StochasticDepth(0.5, "row"),
        nn.AlphaDropout(0.5),
        Own(0.5),
    )
    expected = copy.deepcopy(network)
    layers = make_per_image(network)
    assert [type(layer) for layer in layers] == [PerImageDropout, PerImageStochasticDepth]
    assert make_per_image(network) == layers  # a second fit
    assert network.state_dict().keys() == expected.state_dict().keys()

    def same(x: Tensor, part: slice = slice(None)) -> bool:
        """Whether torch draws, from the same state of its generator."""
        torch.manual_seed(0)
        drawn = expected[part](x)
        torch.manual_seed(0)
        return torch.equal(network[part](x), drawn)

    x = torch.rand(5, 4)
    assert same(x)
    set_keys(layers, 0, 0, torch.arange(5))
    assert not same(x)
    # rows that are no images, as inside attention
    assert same(torch.ones(10, 4), slice(1, 2))
    network.eval()
    expected.eval()
    assert same(x)


class Random(TorchDispatchMode):
    """Sees what draws from torch's generator."""

    seen = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


# A run over all of torchvision's (torch 2.15, torchvision 0.29) found none that draws otherwise; here one of a kind.
SWEPT = ["alexnet", "convnext_tiny", "googlenet", "inception_v3", "swin_t", "vgg11_bn", "vit_b_32"]


@pytest.mark.parametrize(
    "backbone", ["efficientnet_b0", *(pytest.param(b, marks=pytest.mark.slow) for b in SWEPT)]
)
def test_torchvisions_networks_draw_by_image_alone(backbone):
    x = torch.empty(2, 3, 224, 224, device="meta")
    with torch.device("meta"):
        network = build(backbone, 4).train()
    if backbone != "vit_b_32":  # whose rate is 0
        with Random() as random:
            network(x)
        assert random.seen
    set_keys(make_per_image(network), 0, 0, torch.empty(2, dtype=torch.int64, device="meta"))
    with Random() as random:
        network(x)
    assert not random.seen
