"""End the processes of a run together: the other ranks end if rank 0 ends, and rank 0 ends if one of them fails.

All ranks end if one of them neither works nor ends. The rest is for the processes that Lightning starts, one for each
further device of the machine. torchrun and srun end theirs themselves.
"""

import os
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

from finetune import lightning_private
from finetune.system.terminal import write_line

if TYPE_CHECKING:
    import pytorch_lightning as pl

_RANK_ZERO = "FINETUNE_FIRST_PROCESS"  # environment variable: the pid of rank 0
PARENT = "FINETUNE_PARENT_PROCESS"  # environment variable: the pid of the program that has started the fit
_GRACE = 5.0  # seconds in which rank 0 may notice by itself that another rank has ended
_STOPPED = {128 + signum for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
# Seconds for rank 0 to stop after another rank was stopped by a signal or has failed. NCCL would wait forever.
_TIME_TO_STOP = 30.0

ending = threading.Event()  # set while this process ends; that may take a while
_children: list[subprocess.Popen] = []  # of rank 0: the ranks that Lightning has started


def drop_stale_ranks() -> None:
    """Remove rank variables of an earlier job from the environment: this process would take itself for another rank.

    Launchers and Lightning set MASTER_PORT together with them, so without it the variables are stale.
    """
    if "MASTER_PORT" not in os.environ:
        for name in ("RANK", "LOCAL_RANK"):
            os.environ.pop(name, None)


def end_with_rank_zero() -> None:
    """Start a thread that ends this process as soon as rank 0 has ended, for example if it was killed.

    On rank 0 the thread watches the program that has started the fit, if there is one.
    """
    is_rank_zero = os.environ.get("LOCAL_RANK", "0") == "0"
    # taken away, since what this process starts has another parent
    watched = os.environ.pop(PARENT, "") if is_rank_zero else os.environ.get(_RANK_ZERO, "")
    if watched:
        threading.Thread(
            target=_end_after, args=(int(watched),), name="end-with-parent", daemon=True
        ).start()


def _end_after(pid: int) -> None:
    while os.getppid() == pid:
        time.sleep(1)
    os._exit(1)


def take_over(trainer: "pl.Trainer") -> None:
    """Replace Lightning's process observer and signal handlers by those of this package."""
    ending.clear()
    launcher: Any = trainer.strategy.launcher
    if lightning_private.is_subprocess_launcher(launcher):
        if not launcher.cluster_environment.creates_processes_externally:
            os.environ[_RANK_ZERO] = str(os.getpid())
        lightning_private.set_process_observer(_observe)
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
        rank, code = next((i, code) for i, code in enumerate(codes, 1) if code)
        was_stopped = code in _STOPPED
        if ending.wait(_TIME_TO_STOP if was_stopped else _GRACE):
            if was_stopped:
                return
            time.sleep(_TIME_TO_STOP)  # in which it writes pending files and reports its own error
        what = "was stopped" if was_stopped else f"ended with code {code}"
        write_line(
            f"finetune: error: process {rank} {what}, and this one cannot continue without it"
        )
        kill_children()
        os._exit(code if was_stopped else 1)

    threading.Thread(target=run, name="observe-processes", daemon=True).start()


def kill_children() -> None:
    for process in _children:
        process.kill()
