"""The processes that read pictures: how many, with how much shared memory, and what they do first."""

import os
import shutil
import signal
import sys
from pathlib import Path
from types import TracebackType

import pytorch_lightning as pl
import torch

from finetune.machine import num_cores

_SHARED_MEMORY = Path("/dev/shm")
_BATCHES_AHEAD = 3  # of each worker: two that the loader asks for ahead, and the one that training holds


def automatic_workers(trainer: pl.Trainer | None) -> int:
    """Return how many processes should read pictures for each device of this machine."""
    cores = num_cores()
    # srun gives each task cores of its own; what other starters give is for all devices of the machine.
    sharing = trainer.num_devices if trainer and "SLURM_STEP_ID" not in os.environ else 1
    if trainer and trainer.strategy.root_device.type == "cpu":
        return min(1, cores // (2 * sharing))  # the network needs the cores more than decoding does
    return max(1, min(8, cores // sharing))


def check_shared_memory(num_workers: int, batch_bytes: int) -> None:
    """Make sure that batches can be handed over: where memory runs out, workers only wait, for ever.

    Args:
        num_workers: Worker processes of one device.
        batch_bytes: Size of a device's batch.

    Raises:
        ValueError: There is too little.
    """
    if num_workers == 0 or not _SHARED_MEMORY.is_dir():
        return
    needed, free = num_workers * _BATCHES_AHEAD * batch_bytes, shutil.disk_usage(_SHARED_MEMORY).free
    if needed > free:
        raise ValueError(
            f"{_SHARED_MEMORY} has {free / 2**20:.0f} MB free, {num_workers} workers need up to "
            f"{needed / 2**20:.0f} MB to hand over batches: give a container more (docker run --shm-size=8g), or set "
            "--data.num_workers 0 or a smaller --data.batch_size"
        )


def start_worker(worker_id: int) -> None:
    """Prepare a process that reads pictures."""
    torch.set_num_threads(1)
    sys.excepthook = _tell_unless_left
    # Ctrl-C in a terminal and SIGTERM to a whole job reach every process; the main one decides when its workers end.
    # It does so by SIGTERM too if need be: only the first is ignored.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _tell_unless_left(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    # A main process that ends while a batch is handed over leaves its worker's thread with half a connection, whose
    # traceback multiprocessing would print (resource_sharer.py). What else fails in a worker reaches the main process.
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, traceback)
