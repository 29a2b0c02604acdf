"""Dropout and stochastic depth as functions of (seed, step, image, layer), so that they do not depend on the device.

torch's own layers draw from the device's generator, so several devices draw other numbers than a single one would. Here
each image of a batch has a key for each layer, from which its random numbers follow. A rank needs only its per-rank
batch, and a resumed run needs no saved state. Masks come from integers, so they are the same in any float type. They
should also be the same on any kind of device (not tried on GPUs yet).

A key is the state of a SplitMix64 generator. So is each number that the generator gives: the key of a step gives those
of its images, the key of an image those of its layers, and the key of a layer its values. An image that occurs twice in
a batch has the same mask twice.

Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (2014). The constants are those of
Vigna's splitmix64.c.
"""

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from finetune.data.samplers import run_seed, step_seed

# Shapes: B images of the per-rank batch, L layers, C channels.

_GAMMA = 0x9E3779B97F4A7C15 - 2**64  # constants are signed, since torch has no uint64 arithmetic
_FACTORS = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def _nth(keys: Tensor, n: Tensor | int) -> Tensor:
    """Return the n-th number of the generators in the states `keys`, for any integer n. int64 arithmetic wraps."""
    z = keys + n * _GAMMA
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        z = (z ^ _shift_right(z, shift)) * factor
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, shift: int) -> Tensor:
    """Shift bits without sign extension, unlike torch's `>>`."""
    return (z >> shift) & (2 ** (64 - shift) - 1)


class _PerImage(nn.Module):
    """Mixin for the layers below. A layer behaves like torch's own until a training step has set its keys."""

    p: float
    keys: Tensor | None = None  # (B,) for this step, or (1,) if the whole batch shares one number
    num_calls = 0  # calls in this step, since a module may be used in several places
    scale_by_keep = True  # timm's layers may set it to false

    def forward(self, input: Tensor) -> Tensor:
        keys = self._next_keys(input)
        if keys is None:
            return super().forward(input)
        shape = (len(keys), *self._shape(input))
        numbers = torch.arange(1, math.prod(shape[1:]) + 1, device=keys.device)
        lowest_dropped = min(int((1 - self.p) * 2**64), 2**64 - 1) - 2**63
        is_kept = (_nth(keys[:, None], numbers) < lowest_dropped).view(shape)
        scale = 1 / (1 - self.p) if self.scale_by_keep and self.p < 1 else 1.0
        return input.masked_fill(~is_kept, 0) * scale

    def _next_keys(self, input: Tensor) -> Tensor | None:
        """Return the keys of this call, (B,) or (1,); None if torch's generator is to be used."""
        # This check comes first, since torch.fx traces the layer in eval mode.
        if not self.training or self.p == 0 or self.keys is None:
            return None
        if len(self.keys) != len(input) and not self.is_per_batch:
            return None  # the rows are not images, for example inside attention
        # Values have positive n, further calls negative n.
        keys = self.keys if self.num_calls == 0 else _nth(self.keys, -self.num_calls)
        self.num_calls += 1
        return keys

    @property
    def is_per_batch(self) -> bool:
        return getattr(self, "mode", "row") == "batch"

    def _shape(self, input: Tensor) -> tuple[int, ...]:
        """Return the shape of the mask of an image. By default it is one number, as for residual branches."""
        return (1,) * (input.ndim - 1)


class PerImageDropout(_PerImage, nn.Dropout):
    """Drops single values."""

    def _shape(self, input: Tensor) -> tuple[int, ...]:
        return tuple(input.shape[1:])


class PerImageDropout2d(_PerImage, nn.Dropout2d):
    """Drops whole channels."""

    def _shape(self, input: Tensor) -> tuple[int, ...]:
        return (input.shape[1], *[1] * (input.ndim - 2))


class PerImageStochasticDepth(_PerImage, StochasticDepth):
    """Drops a residual branch for single images, or for the complete batch in the mode `batch` of torchvision."""


@functools.cache
def _per_image_drop_path(drop_path: type) -> type:
    return type("PerImageDropPath", (_PerImage, drop_path), {})


_REPLACEMENTS: dict[type, type] = {
    nn.Dropout: PerImageDropout,
    nn.Dropout2d: PerImageDropout2d,
    StochasticDepth: PerImageStochasticDepth,
}


def make_per_image(network: nn.Module) -> list[_PerImage]:
    """Replace the classes of dropout and stochastic depth layers by those above, in place, and return the layers.

    Layers of classes derived from torch's are skipped, since they may do more.
    """
    # If timm is not imported, the network is not one of timm.
    replacements = dict(_REPLACEMENTS)
    timm_layers = sys.modules.get("timm.layers")
    if timm_layers is not None:
        replacements[timm_layers.DropPath] = _per_image_drop_path(timm_layers.DropPath)
    layers: list[Any] = [
        module
        for module in network.modules()
        if type(module) in (*replacements, *replacements.values())
    ]
    for layer in layers:
        layer.__class__ = replacements.get(type(layer), type(layer))
        if not hasattr(layer, "p"):  # timm's
            layer.p = layer.drop_prob
    return layers


def set_keys(layers: Sequence[_PerImage], seed: int, step: int, indices: Tensor) -> None:
    """Set the keys of layers for a training step.

    Args:
        layers: The result of `make_per_image`. Keys depend on the order of the layers.
        seed: The seed of the run.
        step: Index of the batch, counted from 0 over all epochs; with gradient accumulation too.
        indices: Indices (B,) of the images in the training split, on the device of the network.
    """
    if not layers:
        return
    state = torch.full((1,), step_seed(seed, step, 0), device=indices.device)
    order = torch.arange(1, len(layers) + 1, device=indices.device)
    # (L, B + 1): the last column is for layers with one number per batch
    keys = _nth(_nth(state, torch.cat([indices + 1, torch.zeros_like(state)])), order[:, None])
    for layer, row in zip(layers, keys, strict=True):
        layer.keys = row[-1:] if layer.is_per_batch else row[:-1]
        layer.num_calls = 0


class Noise(pl.Callback):
    """Makes dropout depend on the image.

    Dropout inside attention, functional dropout and other random modules depend on the device: they use torch's
    generator. It is seeded before each step, so that its state does not have to be saved.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._layers = make_per_image(pl_module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, _: int
    ) -> None:
        # not global_step, which counts optimizer steps instead of batches
        step = trainer.fit_loop.epoch_loop.total_batch_idx
        _seed(trainer.strategy.root_device, step_seed(run_seed(), step, trainer.global_rank))
        # Batches of another DataLoader have no indices. Layers then use torch's generator.
        if "index" in batch:
            set_keys(self._layers, run_seed(), step, batch["index"])


def _seed(device: torch.device, seed: int) -> None:
    """Seed torch's generators for the CPU and a device. `torch.manual_seed` is slower: it checks all devices."""
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
