"""The loader of training: it reads one epoch after another, so that none begins with waiting for its first batch."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

from finetune.data.loader import Loader
from finetune.data.samplers import FitLimits, TrainBatches, batches_within


class EveryEpoch(Sampler[list[tuple[int, int]]]):
    """The batches of an epoch from where it stands, then of all after it; `len()` is that of a full one.

    Args:
        batches: Those of one epoch, which Lightning sets.
        num_batches: How many of an epoch are taken.
        num_epochs: How many there are, counted from the first of the run; the one that is set comes in any case.
    """

    def __init__(self, batches: TrainBatches, num_batches: int, num_epochs: float) -> None:
        self.sampler = batches  # Lightning calls `batch_sampler.sampler.set_epoch`
        self.num_batches, self.num_epochs = num_batches, num_epochs

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
    """A `Loader` with persistent workers, of which each iteration is an epoch.

    While an epoch's last batches are trained on, and while it is validated and kept, the workers read the first ones of
    the next. Where what is asked for is not what they have read, after an epoch that was left inside or for another
    one than the next, they begin anew.

    Args:
        batches: Those of an epoch.
        limits: How many epochs there are, and how long; without them no epoch is read ahead.
    """

    def __init__(
        self, dataset: Any, batches: TrainBatches, limits: FitLimits | None, **options: Any
    ) -> None:
        every = EveryEpoch(batches, len(batches), 0)
        if limits is not None:
            every.num_batches = batches_within(limits.limit_train_batches, len(batches))
            every.num_epochs = limits.num_epochs
        super().__init__(dataset, batch_sampler=every, persistent_workers=True, **options)
        self._is_read: tuple[int, int] | None = None  # epoch and batch of what comes next

    def __iter__(self) -> Any:
        every: Any = self.batch_sampler
        epoch, first = every.sampler.epoch, every.sampler.batch
        is_read, self._is_read = self._is_read == (epoch, first) and not self.is_ended(), None
        if not is_read:
            super().__iter__()
        return self._epoch(epoch, first)

    def _epoch(self, epoch: int, first: int) -> Iterator[Any]:
        every: Any = self.batch_sampler
        for i in range(first, every.num_batches):
            held = [next(self._iterator)]
            if i + 1 == every.num_batches and epoch + 1 < every.num_epochs:
                self._is_read = epoch + 1, 0
            yield held.pop()  # a name would keep the last one until the next epoch
