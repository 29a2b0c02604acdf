"""The processes that read pictures: how many, with how much shared memory, and whose signals they obey."""

import functools
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader

from finetune.data.worker_start import SIGNALS, Forks, Workers, is_forking
from finetune.distributed.signals import is_first_process
from finetune.system.machine import num_cores

log = logging.getLogger(__name__)

MOST_WORKERS_PER_CORE = 4
_SHARED_MEMORY = Path("/dev/shm")
# batches of each worker: what the loader asks for ahead, and what training holds
_ASKED_FOR, _HELD = 2, 1
BATCHES_AHEAD = _ASKED_FOR + _HELD
_SMALL = 2**15  # bytes of a tensor that is cheaper to copy than to share
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


def num_sharing(devices: Devices | None) -> int:
    """Return how many devices share the cores of this process.

    srun gives each task cores of its own. Other launchers give all devices of the machine the same cores.
    """
    return 1 if devices is None or "SLURM_STEP_ID" in os.environ else devices.num


def automatic_workers(devices: Devices | None) -> int:
    """Return how many processes should read images for each device of this machine; None is one GPU."""
    cores = num_cores()
    sharing = num_sharing(devices)
    if devices is not None and devices.kind == "cpu":
        return min(1, cores // (2 * sharing))  # the network needs the cores more than decoding does
    return max(1, min(8, cores // sharing))


def bounded_workers(num_workers: int, devices: Devices | None) -> int:
    """Return how many of the wanted processes a device may start: all devices together 4 for each core.

    More only wait for one another, and thousands stop a machine. Their number changes no result.
    """
    most = max(1, MOST_WORKERS_PER_CORE * num_cores() // num_sharing(devices))
    if num_workers > most and is_first_process():
        _tell_bound(num_workers, most)
    return min(num_workers, most)


@functools.cache
def _tell_bound(num_workers: int, most: int) -> None:
    where = f"{MOST_WORKERS_PER_CORE} for each of {num_cores()} cores"
    log.warning(
        "data.num_workers %d: only %d are started for each device, %s", num_workers, most, where
    )


def check_shared_memory(
    num_workers: int, batch_bytes: int, num_devices: int = 1, num_ahead: int = BATCHES_AHEAD
) -> None:
    """Make sure that batches can be handed over: where memory runs out, workers only wait, for ever.

    Args:
        num_workers: Worker processes of one device.
        batch_bytes: Size of a device's batch.
        num_devices: Of this machine, which all hand over in the same memory.
        num_ahead: Most batches of a worker that there are at a time.

    Raises:
        ValueError: There is too little.
    """
    if num_workers == 0 or not _SHARED_MEMORY.is_dir():
        return
    num = num_workers * num_devices
    needed, free = num * num_ahead * batch_bytes, shutil.disk_usage(_SHARED_MEMORY).free
    if needed > free:
        raise ValueError(
            f"{_SHARED_MEMORY} has {free / 2**20:.0f} MB free, {num} workers{' of all devices' * (num_devices > 1)} "
            f"need up to {needed / 2**20:.0f} MB to hand over batches: give a container more (docker run "
            "--shm-size=8g), or set --data.num_workers 0 or a smaller --data.batch_size"
        )


def loader_options(
    devices: Devices | None,
    num_workers: int | str,
    batch_bytes: int,
    num_ahead: int = BATCHES_AHEAD,
) -> dict[str, Any]:
    """Return a loader's options for reading batches of at most so many bytes on this device.

    Args:
        devices: Those of the Trainer, if any.
        num_workers: A number, which `bounded_workers` bounds, or `auto` for what suits the machine.
        batch_bytes, num_ahead: See `check_shared_memory`.
    """
    num = (
        bounded_workers(num_workers, devices)
        if isinstance(num_workers, int)
        else automatic_workers(devices)
    )
    check_shared_memory(num, batch_bytes, 1 if devices is None else devices.num, num_ahead)
    return {"num_workers": num, "pin_memory": is_pinned(devices), "worker_init_fn": start_worker}


def is_pinned(devices: Devices | None) -> bool:
    """Return whether batches are on their way to a GPU, which copies them sooner from pinned memory."""
    return devices is not None and devices.kind == "cuda"


class BatchesAhead:
    """How many batches of a worker there are at most, for each loader of a fit.

    The loader of training is reckoned with first, and for what comes beside it, too: when that begins, some of the
    memory is taken already, by training's own.
    """

    def __init__(self) -> None:
        self._is_fed = False

    def __call__(self, split: str, is_train: bool, is_validated: bool, is_pinned: bool) -> int:
        """Return the number for a loader that is about to be made; 0 where it is reckoned with.

        Args:
            split: Its name.
            is_train: Whether training reads it.
            is_validated: Whether the fit validates.
            is_pinned: Whether batches are pinned; those leave the shared memory at once.
        """
        if self._is_fed and split in ("train", "val"):
            return 0
        self._is_fed |= is_train
        if is_train and is_validated and not is_pinned:
            return BATCHES_AHEAD + _ASKED_FOR
        return BATCHES_AHEAD


class Loader(DataLoader):
    """A DataLoader whose workers end when the main process wants it or is gone, and never by another's signal.

    Ctrl-C in a terminal, one that closes, and a scheduler's SIGTERM reach every process of a job: the main one decides
    what becomes of it, and needs its workers until then.
    """

    _iterator: Any

    def __iter__(self) -> Any:
        if self.is_ended():
            self._iterator = None  # a persistent one: begin anew
        # A signal that met a process just forked would find the main one's handlers there.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            if self.num_workers and is_forking(self.multiprocessing_context):
                self.multiprocessing_context = Forks(before)
            iterator = super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self.num_workers:
            _started.add(iterator)
        return iterator

    def _get_iterator(self) -> Any:
        if self.num_workers == 0:
            return super()._get_iterator()
        return Workers(self)

    def is_ended(self) -> bool:
        """Return whether persistent workers are to be started, or started again."""
        return self._iterator is None or self._iterator in _ended

    def started(self) -> "Loader":
        """Return this, persistent workers started before anything is read: the batch sampler can then be held.

        Forked later, they would hold every page that training has touched, and the system would have to copy each as
        soon as training writes to it again.
        """
        if self.persistent_workers:
            batches: Any = self.batch_sampler
            batches.is_held = True
            iter(self)
            batches.is_held = False
        return self


def end_workers() -> None:
    """End the workers of all `Loader`s.

    Python's garbage collector is too late for it: it takes an iterator that is part of a cycle, as in a trainer or an
    exception's frames, apart from the queues that would tell the workers, and then waits 5 s for each of them.

    May be called again where it was interrupted: the news of a killed worker, which torch raises wherever the main
    thread is, can come after another error that its death has led to.
    """
    while _started:
        iterator = next(iter(_started))
        _ended.add(iterator)
        iterator._shutdown_workers()
        _started.discard(iterator)  # only now: a worker's end may be raised at any point before


def start_worker(worker_id: int) -> None:
    """Prepare a process that reads pictures."""
    torch.set_num_threads(1)
    ForkingPickler.register(Tensor, _by_value)
    sys.excepthook = _tell_unless_left
    main = multiprocessing.parent_process()
    assert main is not None, "only a process that multiprocessing has started is a worker"
    for signum in SIGNALS - {signal.SIGTERM}:
        signal.signal(signum, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):  # not on macOS, where any SIGTERM ends a worker
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with, args=(main,), name="end-with-main", daemon=True).start()


def _by_value(tensor: Tensor) -> Any:
    # Labels and indices go in the message itself: each tensor in shared memory costs the process that trains a
    # connection of its own to the worker.
    if (
        tensor.nbytes > _SMALL
        or tensor.requires_grad
        or tensor.dtype not in (torch.int64, torch.float32)
    ):
        return reduce_tensor(tensor)
    return torch.from_numpy, (tensor.numpy().copy(),)


def _end_with(main: Any) -> None:
    # Python's exit and a DataLoader that gives up send SIGTERM, then wait for as long as it takes; a handler would not
    # be told who has sent it. A main process that was killed says nothing.
    # the main process or the one that forks for it; younger workers keep it alive to `is_alive`
    parent = os.getppid()
    while main.is_alive() and os.getppid() == parent:
        signum = signal.sigtimedwait({signal.SIGTERM}, 1)
        if signum is not None and signum.si_pid == main.pid:
            break
    os._exit(0)  # with another code the DataLoader would report a worker that failed


def _tell_unless_left(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    # A main process that ends while a batch is handed over leaves its worker's thread with half a connection, whose
    # traceback multiprocessing would print (resource_sharer.py). What else fails in a worker reaches the main process.
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, traceback)
