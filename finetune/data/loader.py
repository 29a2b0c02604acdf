"""Loaders: their workers with shared memory and signals, epochs that are read ahead, and the copy to a GPU."""

import copy
import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from finetune.data.batch_limits import FitLimits, batches_within
from finetune.data.mirror import Ahead
from finetune.data.samplers import TrainBatches
from finetune.distributed.signals import handle_signals_while_waiting
from finetune.system.machine import num_cores

MOST_WORKERS_PER_CORE = 4
_SHARED_MEMORY = Path("/dev/shm")
# batches per worker: prefetched by the loader, and held by the training loop
PREFETCHED = 2
_IN_TRAINING = 1
BATCHES_AHEAD = PREFETCHED + _IN_TRAINING
SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_started: WeakSet[Any] = WeakSet()  # iterators of loaders that have workers
_ended: WeakSet[Any] = WeakSet()


@dataclass(frozen=True)
class Devices:
    """The devices of this machine that a fit computes on.

    Attributes:
        kind: Such as `cpu` or `cuda`.
        num: Their number.
    """

    kind: str
    num: int

    @property
    def is_pinned(self) -> bool:
        """Whether to pin batches: a GPU copies faster from pinned memory."""
        return self.kind == "cuda"


def num_sharing(devices: Devices | None) -> int:
    """Return how many devices share the cores of this process.

    With srun each task has its own cores. With other launchers all devices of a machine share them.
    """
    return 1 if devices is None or "SLURM_STEP_ID" in os.environ else devices.num


def automatic_workers(devices: Devices | None) -> int:
    """Return the number of workers per device for this machine; None stands for one GPU."""
    cores = num_cores()
    sharing = num_sharing(devices)
    if devices is not None and devices.kind == "cpu":
        return min(1, cores // (2 * sharing))  # the network needs the cores more than decoding does
    return max(1, min(8, cores // sharing))


def check_shared_memory(
    num_workers: int, batch_bytes: int, num_devices: int = 1, num_ahead: int = BATCHES_AHEAD
) -> None:
    """Check that shared memory is large enough for the batches. Workers would otherwise hang when it is full.

    Args:
        num_workers: Workers per device.
        batch_bytes: Size of a per-rank batch.
        num_devices: Devices of this machine; all share this memory.
        num_ahead: Largest number of batches per worker that exist at a time.

    Raises:
        ValueError: The free shared memory is too small.
    """
    if num_workers == 0 or not _SHARED_MEMORY.is_dir():
        return
    num = num_workers * num_devices
    needed = num * num_ahead * batch_bytes
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if needed > free:
        workers = f"{num} workers" if num_devices == 1 else f"{num} workers of all devices"
        raise ValueError(
            f"{_SHARED_MEMORY} has {free / 2**20:.0f} MB free, {workers} "
            f"need up to {needed / 2**20:.0f} MB to pass batches on: start a container with more (docker run "
            "--shm-size=8g), or set --data.num_workers 0 or a smaller --data.batch_size"
        )


def loader_options(
    devices: Devices | None,
    num_workers: int | str,
    batch_bytes: int,
    num_ahead: int = BATCHES_AHEAD,
) -> dict[str, Any]:
    """Return the DataLoader options for per-rank batches of at most `batch_bytes`.

    Args:
        devices: Devices of the Trainer, if any.
        num_workers: A number, of which at most 4 per core are started, or `auto` to choose for this machine.
        batch_bytes: See `check_shared_memory`.
        num_ahead: See `check_shared_memory`.
    """
    num = automatic_workers(devices)
    if isinstance(num_workers, int):
        # More workers would only wait for each other, and thousands would freeze the machine. The number changes no
        # result.
        most = MOST_WORKERS_PER_CORE * num_cores() // num_sharing(devices)
        num = min(num_workers, max(1, most))
    check_shared_memory(num, batch_bytes, 1 if devices is None else devices.num, num_ahead)
    return {
        "num_workers": num,
        "pin_memory": devices is not None and devices.is_pinned,
        "worker_init_fn": start_worker,
        # Python 3.14's default, a fork server, would run a script without a main guard once more
        "multiprocessing_context": "fork" if num > 0 else None,
    }


class Loader(DataLoader):
    """A DataLoader whose workers only end when the main process ends them or has died.

    Ctrl-C, a closed terminal and a scheduler's SIGTERM reach every process of a job. Workers ignore these signals,
    because the main process decides how to stop and needs its workers until then.

    Args:
        dataset: The images.
        batch_sampler: Batches of keys of the dataset.
        files_of: Returns the files of a batch, which the main process copies from object storage before a worker reads
            them; None for local files.
        options: Those of a DataLoader.
    """

    _iterator: Any

    def __init__(
        self,
        dataset: Any,
        batch_sampler: Any,
        files_of: Callable[[Any], Iterable[str]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dataset, batch_sampler=batch_sampler, **options)
        self._ahead: Ahead[Any] | None = None
        if files_of is not None:
            # when a batch is taken from the sampler, that many may still be with the workers
            in_use = max(1, PREFETCHED * self.num_workers)
            self._ahead = Ahead(batch_sampler, files_of, in_use, handle_signals_while_waiting)

    def __iter__(self) -> Any:
        if self.is_ended():
            self._iterator = None  # persistent workers that have ended: start new ones
        # A process that was just forked still has the main process's handlers, so signals are blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            iterator = super().__iter__()
            if self.num_workers:
                _started.add(iterator)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return iterator

    @property
    def _index_sampler(self) -> Any:
        # torch 2.11 reads the batches of indices from this property
        return super()._index_sampler if self._ahead is None else self._ahead

    def is_ended(self) -> bool:
        """Return whether persistent workers must be started, or restarted."""
        return self._iterator is None or self._iterator in _ended

    def start_persistent_workers(self) -> "Loader":
        """Start persistent workers before anything is read, and return this loader.

        Needs a batch sampler with `is_paused`, such as `EvalBatches`. Workers that are forked later would share the
        memory pages of training, and the system would copy each page that training writes to.
        """
        if self.persistent_workers:
            batches: Any = self.batch_sampler
            batches.is_paused = True
            iter(self)
            batches.is_paused = False
        return self


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


class DeviceCopy:
    """Copies batches on a separate CUDA stream.

    On the compute stream, a copy would wait for all kernels in its queue. Lightning requests a batch as soon as the
    previous steps are queued, so a copy on another stream overlaps with them. This needs pinned memory.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def __call__(
        self, batch: Any, device: torch.device, copy_batch: Callable[[Any, torch.device], Any]
    ) -> Any:
        """Return the batch on a device, ready for the kernels that are queued next.

        Args:
            batch: A dict with tensors.
            device: Target device. Other devices than CUDA have no streams.
            copy_batch: Copies the batch to a device.
        """
        if device.type != "cuda":
            return copy_batch(batch, device)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        with torch.cuda.stream(stream):
            there = copy_batch(batch, device)
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(stream)
        for value in there.values():
            if isinstance(value, Tensor):
                # the memory must not be reused by the next copy before the compute stream has read it
                value.record_stream(computing)
        return there


def end_workers() -> None:
    """End the workers of all `Loader`s.

    Garbage collection cannot do this well. An iterator may be in a reference cycle, as in a trainer or in the frames
    of an exception. Its queues may then be collected first, and ending takes 5 s per worker.

    It may be called again after an interruption: torch raises the death of a worker anywhere in the main thread, also
    while another error is handled.
    """
    while _started:
        iterator = next(iter(_started))
        _ended.add(iterator)
        iterator._shutdown_workers()  # noqa: SLF001
        # last, because torch may raise a worker's death at any point before
        _started.discard(iterator)


def start_worker(worker_id: int) -> None:
    """Set up a worker: threads and signals."""
    torch.set_num_threads(1)
    sys.excepthook = _print_unless_disconnected
    main = multiprocessing.parent_process()
    assert main is not None, "only a process that multiprocessing has started is a worker"
    for signum in SIGNALS - {signal.SIGTERM}:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(
        target=_exit_with_main_process, args=(main,), name="end-with-main", daemon=True
    ).start()


def _exit_with_main_process(main: Any) -> None:
    # At exit, Python and the DataLoader send SIGTERM and then wait without a limit. A signal handler would not know
    # the sender, so `sigtimedwait` is used. A killed main process sends nothing, so its death is polled.
    # The parent is the main process or its fork server. `is_alive` alone is not enough: younger workers inherit the
    # file descriptor by which it checks.
    parent = os.getppid()
    while main.is_alive() and os.getppid() == parent:
        signum = signal.sigtimedwait({signal.SIGTERM}, 1)
        if signum is not None and signum.si_pid == main.pid:
            break
    os._exit(0)  # for another exit code the DataLoader would report a failed worker


def _print_unless_disconnected(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    # If the main process ends during the transfer of a batch, a thread of the worker fails with a connection error.
    # multiprocessing (resource_sharer.py) would print its traceback. Other errors reach the main process.
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, traceback)
