"""The training loader: it prefetches the next epoch, so that no epoch starts with waiting for its first batch."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

from finetune.data.batch_limits import FitLimits, batches_within
from finetune.data.loader import Loader
from finetune.data.samplers import TrainBatches


class EveryEpoch(Sampler[list[tuple[int, int]]]):
    """The remaining batches of the current epoch, then those of all later epochs.

    `len()` is that of one full epoch.

    Args:
        batches: The batches of one epoch. Lightning sets the epoch.
        num_batches: Number of batches to take of each epoch.
        num_epochs: Number of epochs of the run. The current epoch is always read.
    """

    def __init__(self, batches: TrainBatches, num_batches: int, num_epochs: float) -> None:
        self.sampler = batches  # Lightning calls `batch_sampler.sampler.set_epoch`
        self.num_batches = num_batches
        self.num_epochs = num_epochs

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        batches = copy.copy(self.sampler)
        for epoch in itertools.count(batches.epoch):
            batches.set_epoch(epoch)
            yield from itertools.islice(batches, max(self.num_batches - batches.batch, 0))
            if epoch + 1 >= self.num_epochs or self.num_batches == 0:
                break

    def __len__(self) -> int:
        return len(self.sampler)


class TrainLoader(Loader):
    """A `Loader` with persistent workers that prefetches the next epoch. Each iteration is one epoch.

    During the last training batches of an epoch, its validation and its checkpoint, workers read the first batches of
    the next epoch. Prefetching restarts if another batch is requested, for example after an epoch that was interrupted.

    Args:
        batches: The batches of an epoch.
        limits: The number of epochs and of batches per epoch; None prefetches no epoch.
    """

    def __init__(
        self, dataset: Any, batches: TrainBatches, limits: FitLimits | None, **options: Any
    ) -> None:
        every = EveryEpoch(batches, len(batches), 0)
        if limits is not None:
            every.num_batches = batches_within(limits.limit_train_batches, len(batches))
            every.num_epochs = limits.num_epochs
        super().__init__(dataset, batch_sampler=every, persistent_workers=True, **options)
        self._prefetched: tuple[int, int] | None = None  # (epoch, batch) of the next batch

    def __iter__(self) -> Any:
        every: Any = self.batch_sampler
        epoch = every.sampler.epoch
        first = every.sampler.batch
        is_prefetched = self._prefetched == (epoch, first) and not self.is_ended()
        self._prefetched = None
        if not is_prefetched:
            super().__iter__()
        return self._epoch(epoch, first)

    def _epoch(self, epoch: int, first: int) -> Iterator[Any]:
        every: Any = self.batch_sampler
        for i in range(first, every.num_batches):
            batch = [next(self._iterator)]
            if i + 1 == every.num_batches and epoch + 1 < every.num_epochs:
                self._prefetched = epoch + 1, 0
            yield batch.pop()  # a plain variable would keep the last batch alive until the next epoch
