"""Dropout and stochastic depth as functions of (seed, step, picture, layer): they do not depend on the device.

torch's own draw from a generator of the device, so that each device draws other numbers than one alone would. Here each
picture of a batch has a key of its own for each layer, and numbers are counted out from it. A device then needs no more
than its share of the batch, and nothing has to be saved for a resumed run. Masks are drawn in whole numbers: the
same in any float type and, as they should be, on any kind of device (not tried on GPUs yet).

A key is the state of a SplitMix64 generator, and so is each number that it gives: pictures are counted out from the
step's, layers from the picture's, values from the layer's. A picture that is in a batch twice has one mask.

Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (2014); the constants are those of
Vigna's splitmix64.c.
"""

import functools
import logging
import math
import sys
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from finetune.data.samplers import run_seed, step_seed

log = logging.getLogger(__name__)

# Shapes: B pictures of this device's share, L layers, C channels.

_GAMMA = 0x9E3779B97F4A7C15 - 2**64  # all of these as torch has them, signed
_FACTORS = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def _nth(keys: Tensor, n: Tensor | int) -> Tensor:
    """Return the n-th numbers that generators in the states `keys` give: any integer n, int64 in and out, wrapping."""
    z = keys + n * _GAMMA
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        z = (z ^ _right(z, shift)) * factor
    return z ^ _right(z, 31)


def _right(z: Tensor, shift: int) -> Tensor:
    return (z >> shift) & (2 ** (64 - shift) - 1)  # torch's own shift brings the sign in


class _ByPicture(nn.Module):
    """What the layers below share; they are torch's own until a training step has given them keys."""

    p: float
    keys: Tensor | None = None  # (B,) for this step, or (1,) where the batch has one number
    num_calls = 0  # in this step: one module may stand in several places

    def _next_keys(self, input: Tensor) -> Tensor | None:
        """Return the keys of this call, (B,) or (1,), or None where torch is to draw."""
        # first: in eval mode torch.fx comes along here
        if not self.training or self.p == 0 or self.keys is None:
            return None
        if len(self.keys) != len(input) and not self.is_one_for_all:
            return None  # its rows are no pictures, as inside attention
        # values count upwards
        keys = self.keys if self.num_calls == 0 else _nth(self.keys, -self.num_calls)
        self.num_calls += 1
        return keys

    @property
    def is_one_for_all(self) -> bool:
        return getattr(self, "mode", "row") == "batch"

    def _is_kept(self, numbers: Tensor) -> Tensor:
        return numbers < min(int((1 - self.p) * 2**64), 2**64 - 1) - 2**63

    @property
    def _scale(self) -> float:
        return 1 / (1 - self.p) if self.p < 1 else 0.0


class _Dropout(_ByPicture):
    def forward(self, input: Tensor) -> Tensor:
        keys = self._next_keys(input)
        if keys is None:
            return super().forward(input)
        shape = self._shape(input)
        values = torch.arange(1, math.prod(shape[1:]) + 1, device=keys.device)
        kept = self._is_kept(_nth(keys[:, None], values)).view(shape)
        return input.masked_fill(~kept, 0) * self._scale

    def _shape(self, input: Tensor) -> tuple[int, ...]:
        return (*input.shape[:2], *[1] * (input.ndim - 2))  # whole channels


class PictureDropout(_Dropout, nn.Dropout):
    """Drops values."""

    def _shape(self, input: Tensor) -> tuple[int, ...]:
        return tuple(input.shape)


class PictureDropout1d(_Dropout, nn.Dropout1d):
    """Drops channels, as the next two."""


class PictureDropout2d(_Dropout, nn.Dropout2d):
    pass


class PictureDropout3d(_Dropout, nn.Dropout3d):
    pass


class PictureStochasticDepth(_ByPicture, StochasticDepth):
    """Drops a residual branch for a picture, or in the mode `batch` for all."""

    def forward(self, input: Tensor) -> Tensor:
        keys = self._next_keys(input)
        if keys is None:
            return super().forward(input)
        kept = self._is_kept(keys).to(input.dtype) * self._scale  # a key is as good a number as any
        return input * kept.view(-1, *[1] * (input.ndim - 1))


class _DropPath(_ByPicture):
    """Mixed into timm's stochastic depth."""

    drop_prob: float
    scale_by_keep: bool

    def forward(self, x: Tensor) -> Tensor:
        keys = self._next_keys(x)
        if keys is None:
            return super().forward(x)
        kept = self._is_kept(keys).to(x.dtype) * (self._scale if self.scale_by_keep else 1.0)
        return x * kept.view(-1, *[1] * (x.ndim - 1))


@functools.cache
def _of_timm(kind: type) -> type:
    return type("PictureDropPath", (_DropPath, kind), {})


_OURS: dict[type, type] = {
    **{nn.Dropout: PictureDropout, nn.Dropout1d: PictureDropout1d, nn.Dropout2d: PictureDropout2d},
    **{nn.Dropout3d: PictureDropout3d, StochasticDepth: PictureStochasticDepth},
}


def by_picture(network: nn.Module) -> list[_ByPicture]:
    """Let dropout and stochastic depth of a network draw by picture, in place, and return these layers.

    Classes derived from torch's are left alone: they may do more.
    """
    # there is a network of timm's only where that is there
    ours, layers = dict(_OURS), sys.modules.get("timm.layers")
    if layers is not None:
        ours[layers.DropPath] = _of_timm(layers.DropPath)
    found: list[Any] = [
        module for module in network.modules() if type(module) in (*ours, *ours.values())
    ]
    for module in found:
        module.__class__ = ours.get(type(module), type(module))
        if isinstance(module, _DropPath):
            module.p = module.drop_prob
    return found


def draw(layers: Sequence[_ByPicture], seed: int, step: int, pictures: Tensor) -> None:
    """Give layers their keys for a training step.

    Args:
        layers: What `by_picture` returned: their order is that of the numbers.
        seed: That of the run.
        step: Batch, from 0, counted over epochs, also where several are gathered for a step.
        pictures: Indices (B,) in the training split, on the device that computes.
    """
    if not layers:
        return
    state = torch.full((1,), step_seed(seed, step, 0), device=pictures.device)
    order = torch.arange(1, len(layers) + 1, device=pictures.device)
    # (L, B + 1)
    keys = _nth(_nth(state, torch.cat([pictures + 1, torch.zeros_like(state)])), order[:, None])
    for layer, row in zip(layers, keys, strict=True):
        layer.keys = row[-1:] if layer.is_one_for_all else row[:-1]
        layer.num_calls = 0


class Noise(pl.Callback):
    """Lets a network draw by picture, and says on several devices where it draws otherwise: that depends on them.

    Dropout inside attention does, functional dropout, and modules of other kinds. They move torch's generator, which is
    seeded here before each step, so that there is no state of it to save.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._layers = by_picture(pl_module)
        self._is_checked = trainer.world_size == 1

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, _: int
    ) -> None:
        # not global_step, which waits for accumulated batches
        step = trainer.fit_loop.epoch_loop.total_batch_idx
        _seed(trainer.strategy.root_device, step_seed(run_seed(), step, trainer.global_rank))
        # a loader of somebody else's doesn't say which pictures these are: torch then draws
        if "index" in batch:
            draw(self._layers, run_seed(), step, batch["index"])

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        if (
            not self._is_checked
            and _has_drawn(trainer.strategy.root_device)
            and trainer.is_global_zero
        ):
            words = "%s draws random numbers that depend on the device: it ends otherwise on another number of them"
            log.warning(words, pl_module.backbone)
        self._is_checked = True


def _seed(device: torch.device, seed: int) -> None:
    """Seed torch's generators for the CPU and a device; `torch.manual_seed` asks for each kind that is not there."""
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def _has_drawn(device: torch.device) -> bool:
    """Return whether torch's generators for the CPU and a device have moved since they were seeded."""
    used = [torch.default_generator]
    if device.type == "cuda":
        used.append(torch.cuda.default_generators[device.index or 0])
    return any(
        not torch.equal(
            one.get_state(), torch.Generator(one.device).manual_seed(one.initial_seed()).get_state()
        )
        for one in used
    )
