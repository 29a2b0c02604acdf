"""The order of the images and the part of each rank: functions of (seed, epoch), not of workers, ranks or restarts.

Global batch i of an epoch is the i-th slice of one permutation. Rank r of k takes the r-th contiguous part of it. In
evaluation rank r takes the r-th contiguous part of the complete list. Nothing is padded, and no image counts twice.
Splits are sorted by class, so a limit of evaluation batches takes evenly spaced images.
"""

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from finetune.data.batch_limits import num_within
from finetune.data.targets import Targets

# Random streams that share a seed must not overlap. NumPy pads a short seed with zeros, so (0, 3) equals (0, 3, 0).
# Therefore each seed begins with the kind of its stream. Splits use hashes (splits.py). The seeds of the demo images
# begin with the letters of a class name, whose codes are above all kinds. Another number would change the results of
# a run.
_ORDER = 0
_AUGMENTATION = 1
_STEP = 2
SHEET = 3  # images on a contact sheet, and those on which an export is verified
ESTIMATE = 4  # images for a measurement, such as the size of a cache
MIXING = 5


def run_seed() -> int:
    """Return the seed of this run, as set by Lightning's `seed_everything`; 0 if unset."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def train_order(num_images: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the images in an epoch: a permutation (num_images,) of their indices."""
    return np.random.default_rng((_ORDER, seed, epoch)).permutation(num_images)


def augmentation_seed(seed: int, epoch: int, index: int) -> int:
    """Return the 32-bit seed of the random transforms of image `index` in `epoch`."""
    return int(np.random.SeedSequence((_AUGMENTATION, seed, epoch, index)).generate_state(1)[0])


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of torch's generators for one training step. No generator state has to be saved."""
    return int(
        np.random.SeedSequence((_STEP, seed, step, rank)).generate_state(1, np.uint64)[0]
        >> np.uint64(1)
    )


def draw_indices(num_images: int, num: int, kind: int, seed: int = 0) -> np.ndarray:
    """Return at most `num` random image indices, all different.

    Args:
        num_images: Number of images.
        num: Number of indices.
        kind: The random stream, SHEET or ESTIMATE: two uses with one seed do not draw the same images.
        seed: Seed of the stream.
    """
    return np.random.default_rng((kind, seed)).permutation(num_images)[:num]


def rank_range(num: int, rank: int, world_size: int) -> range:
    """Return the `rank`-th of `world_size` contiguous parts of `range(num)`; sizes differ by one, larger first."""
    size, extra = divmod(num, world_size)
    start = rank * size + min(rank, extra)
    if rank < extra:
        size += 1
    return range(start, start + size)


# Lightning cannot know that this sampler yields every image.
warnings.filterwarnings("ignore", message="You are using a custom batch sampler `EvalBatches`")


class TrainBatches(Sampler[list[tuple[int, int]]]):
    """The per-rank part of every global batch, as lists of (epoch, index). The last, smaller batch is not dropped.

    A part is empty if a batch has fewer images than there are ranks, so all ranks take the same number of steps.
    `len()` is always that of a full epoch.

    Args:
        num_images: Images in the training split.
        batch_size: Images in a global batch, over all devices.
        seed: Seed of the run.
        rank: Rank of this process.
        world_size: Number of ranks.
        epoch: Epoch of the first pass.
        batch: Batch at which the first pass starts; later passes start at 0.
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
    ) -> None:
        self.num_images = num_images
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = epoch
        self.batch = batch
        self.sampler = self  # Lightning calls `batch_sampler.sampler.set_epoch`

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch = epoch
            self.batch = 0

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = self.epoch
        first = self.batch
        order = train_order(self.num_images, self.seed, epoch)
        for i in range(first, len(self)):
            batch = order[i * self.batch_size : (i + 1) * self.batch_size]
            yield [
                (epoch, int(batch[j])) for j in rank_range(len(batch), self.rank, self.world_size)
            ]

    def __len__(self) -> int:
        return math.ceil(self.num_images / self.batch_size)


class EvalBatches(Sampler[Sequence[Any]]):
    """The batches of the `rank`-th contiguous part of the images, in order. All ranks take the same number of steps.

    Ranks communicate after each step, so the last batch of a smaller part may be empty.

    Args:
        num_images: Images in the split, on all ranks together.
        num_per_step: Images in a batch of one rank.
        rank: Rank of this process.
        world_size: Number of ranks.
        key: Returns what the dataset takes for a position in the split. Without it batches are ranges of positions,
            because Lightning stores the indices of predictions.

    Attributes:
        is_paused: While true, iteration yields nothing: a loader can start its workers before anything is read.
    """

    def __init__(
        self,
        num_images: int,
        num_per_step: int,
        rank: int,
        world_size: int,
        key: Callable[[int], Any] | None = None,
    ) -> None:
        self.key = key
        self.is_paused = False
        self.indices = rank_range(num_images, rank, world_size)
        self.num_per_step = num_per_step
        self.num_steps = math.ceil(len(rank_range(num_images, 0, world_size)) / num_per_step)

    def __iter__(self) -> Iterator[Sequence[Any]]:
        if self.is_paused:
            return
        for i in range(self.num_steps):
            batch = self.indices[i * self.num_per_step : (i + 1) * self.num_per_step]
            yield [self.key(position) for position in batch] if self.key else batch

    def __len__(self) -> int:
        return self.num_steps


def evenly_spaced(position: Any, num: int, num_images: int) -> Any:
    """Return the index of an image, by its position among `num` evenly spaced ones of `num_images`.

    Args:
        position: From 0 to `num` - 1; several as an array (n,), whose indices are also (n,).
        num: Number of images that are used.
        num_images: Number of images in the split.
    """
    return position * num_images // num


def evaluated_targets(targets: Targets, limit: float | None, batch_size: int) -> Targets:
    """Return the targets of the images that an evaluation within the Trainer's limit of batches measures."""
    num = num_within(limit, len(targets), batch_size)
    return targets.take(evenly_spaced(np.arange(num), num, len(targets)))
