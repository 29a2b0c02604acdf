"""End the processes of a run together: the other ranks end if rank 0 ends, and rank 0 ends if one of them fails.

All ranks end if one of them neither works nor ends. The rest is for the processes that Lightning starts, one for each
further device of the machine. torchrun and srun end theirs themselves.
"""

import os
import signal
import subprocess
import threading
import time
from datetime import timedelta
from typing import Any

import pytorch_lightning as pl
import torch.distributed as dist

from finetune import lightning_private
from finetune.system.terminal import write_line

LONGEST_WAIT = timedelta(minutes=10)  # for another rank, in training and evaluation
_RANK_ZERO = "FINETUNE_FIRST_PROCESS"  # environment variable: the pid of rank 0
PARENT = "FINETUNE_PARENT_PROCESS"  # environment variable: the pid of the program that has started the fit
_GRACE = 5.0  # seconds in which rank 0 may notice by itself that another rank has ended
_STOPPED = {128 + signum for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
# Seconds for rank 0 to stop after another rank was stopped by a signal or has failed. NCCL would wait forever.
_TIME_TO_STOP = 30.0

ending = threading.Event()  # set while this process ends; that may take a while
_children: list[subprocess.Popen] = []  # of rank 0: the ranks that Lightning has started


def drop_stale_ranks() -> None:
    """Remove rank variables of an earlier job from the environment.

    Launchers and Lightning set MASTER_PORT together with them, so without it the variables are stale.
    """
    if "MASTER_PORT" not in os.environ:
        for name in ("RANK", "LOCAL_RANK"):
            os.environ.pop(name, None)


def end_with_rank_zero() -> None:
    """Start a thread that ends this process as soon as rank 0 has ended, for example if it was killed.

    On rank 0 the thread watches the program that has started the fit, if there is one.
    """
    rank_zero = os.environ.get(_RANK_ZERO)
    parent = os.environ.get(PARENT, "")
    if rank_zero is not None and os.environ.get("LOCAL_RANK", "0") != "0":
        threading.Thread(
            target=_end_after, args=(int(rank_zero),), name="end-with-first", daemon=True
        ).start()
    elif parent == str(os.getppid()):  # otherwise a child of the program has inherited the variable
        threading.Thread(
            target=_end_after, args=(int(parent),), name="end-with-parent", daemon=True
        ).start()


def _end_after(pid: int) -> None:
    while os.getppid() == pid:
        time.sleep(1)
    os._exit(1)


def take_over(trainer: pl.Trainer) -> None:
    """Replace Lightning's process observer and signal handlers by those of this package."""
    ending.clear()
    launcher: Any = trainer.strategy.launcher
    if lightning_private.is_subprocess_launcher(launcher):
        if not launcher.cluster_environment.creates_processes_externally:
            os.environ[_RANK_ZERO] = str(os.getpid())
        lightning_private.set_process_observer(_observe)
    if not lightning_private.has_auto_requeue(trainer):
        lightning_private.disable_signal_handlers(trainer)


def _observe(processes: list[subprocess.Popen]) -> None:
    """End rank 0 if another rank fails, but let it write its checkpoint and error message first.

    Lightning's observer kills rank 0 at once.
    """
    _children[:] = processes

    def run() -> None:
        while not any(codes := [process.poll() for process in processes]):
            if None not in codes:
                return
            time.sleep(0.5)
        rank = next(i for i, code in enumerate(codes, 1) if code)
        if (code := codes[rank - 1]) in _STOPPED:
            if ending.wait(_TIME_TO_STOP):
                return
            write_line(
                f"finetune: error: process {rank} was stopped, and this one would wait for it for ever"
            )
            os._exit(code)
        if ending.wait(_GRACE):
            time.sleep(_TIME_TO_STOP)  # in which it writes pending files and reports its own error
        write_line(
            f"finetune: error: process {rank} ended with code {code}, and this one cannot continue without it"
        )
        _kill_children()
        os._exit(1)

    threading.Thread(target=run, name="observe-processes", daemon=True).start()


class LimitWaits(pl.Callback):
    """Ends a run in which a rank neither works nor ends: a machine without power, a suspended process.

    The other ranks then get an error from the collective in which they wait. Outside of training and evaluation they
    wait for the timeout of the strategy, 30 minutes, since rank 0 may download weights or fit a head. A timeout that
    the user has set for the strategy is kept.
    """

    def _limit(self, trainer: pl.Trainer, *_: Any) -> None:
        _set_timeout(trainer, LONGEST_WAIT)

    def _restore(self, trainer: pl.Trainer, *_: Any) -> None:
        _set_timeout(trainer, dist.default_pg_timeout)

    on_train_start = on_validation_start = on_test_start = _limit  # type: ignore[assignment]
    on_train_end = on_test_end = _restore  # type: ignore[assignment]

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        """Kill the other ranks, which Lightning has started, since a suspended one would not end."""
        if "Timed out waiting" in str(exception):
            _kill_children()


def _set_timeout(trainer: pl.Trainer, timeout: timedelta) -> None:
    own = lightning_private.process_group_timeout(trainer.strategy)
    is_default = own is None or own == dist.default_pg_timeout
    if trainer.world_size > 1 and is_default:
        # torch has no public function for this before 2.15.
        group: Any = dist.group.WORLD
        group._get_backend(trainer.strategy.root_device)._set_default_timeout(timeout)


def _kill_children() -> None:
    for process in _children:
        process.kill()
