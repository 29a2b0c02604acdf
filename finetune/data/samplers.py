"""The order of the pictures and each device's share: functions of (seed, epoch), not of workers, ranks or restarts.

The i-th global batch of an epoch is the i-th slice of one permutation; device r of k takes the r-th contiguous part of
it. In evaluation, device r takes the r-th contiguous part of the whole list: nothing is padded, nothing counted twice.
Where a limit cuts val or test, which are sorted by class, the list is of pictures that lie evenly in all.
"""

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from finetune.data.batch_limits import batches_within as batches_within
from finetune.data.batch_limits import num_within as num_within

# Streams of random numbers that must not meet although they share a seed. NumPy fills a short seed up with zeros, so
# that (0, 3) is (0, 3, 0): each begins with its kind. Splits have hashes, see splits.py; the letters of a class, with
# which the seeds of the drawn sample begin, are above all kinds.
_ORDER, _AUGMENTATION, _STEP, SHEET, ESTIMATE, MIXING = range(6)


def run_seed() -> int:
    """Return the seed of this run: what Lightning's `seed_everything` was given, else 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def train_order(num_images: int, seed: int, epoch: int) -> np.ndarray:
    """Return the permutation (num_images,) of picture indices that `epoch` trains in."""
    return np.random.default_rng((_ORDER, seed, epoch)).permutation(num_images)


def augmentation_seed(seed: int, epoch: int, index: int) -> int:
    """Return the 32-bit seed of the random transforms of picture `index` in `epoch`."""
    return int(np.random.SeedSequence((_AUGMENTATION, seed, epoch, index)).generate_state(1)[0])


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of torch's generators for one training step, so that no generator state needs saving."""
    return int(
        np.random.SeedSequence((_STEP, seed, step, rank)).generate_state(1, np.uint64)[0]
        >> np.uint64(1)
    )


def some_of(num_images: int, num: int, kind: int, seed: int = 0) -> np.ndarray:
    """Return `num` picture indices at random, or all there are: of the kind SHEET or ESTIMATE."""
    return np.random.default_rng((kind, seed)).permutation(num_images)[:num]


def share(num: int, rank: int, world_size: int) -> range:
    """Return the `rank`-th of `world_size` contiguous parts of `range(num)`; sizes differ by one, larger first."""
    size, extra = divmod(num, world_size)
    start = rank * size + min(rank, extra)
    return range(start, start + size + (rank < extra))


# Lightning can't know that ours gives every picture.
warnings.filterwarnings("ignore", message="You are using a custom batch sampler `EvalBatches`")


class TrainBatches(Sampler[list[tuple[int, int]]]):
    """This device's share of every global batch, as lists of (epoch, index); the last, smaller batch is kept.

    A share is empty where a batch has fewer pictures than there are devices: all devices make the same number of steps.

    Args:
        num_images: Pictures in the training split.
        batch_size: Pictures in a global batch, over all devices.
        seed: Seed of the run.
        rank: This device, from 0.
        world_size: Number of devices.
        epoch: Epoch of the first pass.
        batch: Batch at which the first pass starts; later passes start at 0. `len()` is always that of a full epoch.
        is_same: Every epoch has the order of the first: `trainer.overfit_batches` wants the same pictures.
    """

    def __init__(
        self,
        num_images: int,
        batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        epoch: int = 0,
        batch: int = 0,
        is_same: bool = False,
    ) -> None:
        self.num_images = num_images
        self.batch_size = batch_size
        self.seed = seed
        self.rank, self.world_size = rank, world_size
        self.epoch = epoch
        self.batch = batch
        self.is_same = is_same
        self.sampler = self  # Lightning calls `batch_sampler.sampler.set_epoch`

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.batch = epoch, 0

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, first = self.epoch, self.batch
        order = train_order(self.num_images, self.seed, 0 if self.is_same else epoch)
        for i in range(first, len(self)):
            batch = order[i * self.batch_size : (i + 1) * self.batch_size]
            yield [(epoch, int(batch[j])) for j in share(len(batch), self.rank, self.world_size)]

    def __len__(self) -> int:
        return math.ceil(self.num_images / self.batch_size)


class EvalBatches(Sampler[Sequence[Any]]):
    """The `rank`-th contiguous part of all pictures, in order; every device makes the same number of steps.

    Where shares differ, the last batch of a smaller one may be empty: devices speak to each other after each step.
    Batches are ranges, since Lightning keeps those of a prediction; with a `key`, what it makes of each number. None
    come while it `is_held`: a loader can then start its processes, and nothing is read yet.
    """

    def __init__(
        self,
        num_images: int,
        num_per_step: int,
        rank: int,
        world_size: int,
        key: Callable[[int], Any] | None = None,
    ) -> None:
        self.key, self.is_held = key, False
        self.indices, self.num_per_step = share(num_images, rank, world_size), num_per_step
        self.num_steps = math.ceil(len(share(num_images, 0, world_size)) / num_per_step)

    def __iter__(self) -> Iterator[Sequence[Any]]:
        for i in range(0 if self.is_held else self.num_steps):
            batch = self.indices[i * self.num_per_step : (i + 1) * self.num_per_step]
            yield [self.key(row) for row in batch] if self.key else batch

    def __len__(self) -> int:
        return self.num_steps


def spread(place: Any, num: int, num_images: int) -> Any:
    """Return which picture is at a place (or places, (n,)) among `num` that lie evenly in a split of `num_images`."""
    return place * num_images // num


def check_limit(limit: float, split: str, num_images: int, batch_size: int) -> None:
    """Make sure that a Trainer's limit, if it is a share of the batches, leaves some of a split.

    Args:
        limit: A number of batches (int), or a share of them (float).
        split: The name of the split.
        num_images: In the split.
        batch_size: Images of a batch, over all devices.

    Raises:
        ValueError: It leaves none.
    """
    is_share = isinstance(limit, float) and limit > 0
    if is_share and num_images > 0 and num_within(limit, num_images, batch_size) == 0:
        raise ValueError(f"trainer.limit_{split}_batches {limit} is less than one batch of {split}")


@dataclass(frozen=True)
class FitLimits:
    """How long a fit reads the training images, as numbers.

    Attributes:
        max_epochs: Of the whole run, resumed or not; None or -1 for no limit.
        max_steps: Optimizer steps of the whole run; -1 for no limit.
        batches_per_step: Most batches whose gradients a step accumulates.
        limit_train_batches: Of an epoch: a number of batches (int), or a share of them (float).
    """

    max_epochs: int | None
    max_steps: int = -1
    batches_per_step: int = 1
    limit_train_batches: int | float | None = 1.0

    @property
    def num_epochs(self) -> float:
        """Epochs of the run, infinitely many without a limit."""
        return math.inf if self.max_epochs in (None, -1) else self.max_epochs

    def num_reads(self, num_images: int, batch_size: int) -> float:
        """Return how many training images the fit reads in all its epochs.

        Args:
            num_images: In the training split.
            batch_size: Images of a batch, over all devices.
        """
        reads = self.num_epochs * num_within(self.limit_train_batches, num_images, batch_size)
        if self.max_steps != -1:
            reads = min(reads, self.max_steps * self.batches_per_step * batch_size)
        return reads
