"""The processes that Lightning starts for a machine's other devices: they end with the first one, and it with them.

torchrun and srun see to this themselves.
"""

import os
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

from finetune import lightning_private
from finetune.system.terminal import say

if TYPE_CHECKING:
    import pytorch_lightning as pl

_FIRST = "FINETUNE_FIRST_PROCESS"  # its pid, for those that it starts
PARENT = "FINETUNE_PARENT_PROCESS"  # the pid of a program that has started a whole fit
_GRACE = 5.0  # seconds for the first process to notice by itself that another one has ended
_STOPPED = {128 + signum for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
# Seconds for the first process to stop, once a signal has stopped another, for which NCCL would wait for ever, or once
# it has noticed that another has failed.
_TIME_TO_STOP = 30.0

ending = threading.Event()  # this process is at its end, which may take its time


def forget_left_over() -> None:
    """Drop the ranks that a shell still has of another job: a launcher, and Lightning, say a port with them."""
    if "MASTER_PORT" not in os.environ:
        for name in ("RANK", "LOCAL_RANK"):
            os.environ.pop(name, None)


def end_with_first_process() -> None:
    """Let this process end as soon as the first one is gone, even if that was killed, or does not answer any more.

    The first one ends so with the program that has started it, if one has.
    """
    first, parent = os.environ.get(_FIRST), os.environ.get(PARENT, "")
    if first is not None and os.environ.get("LOCAL_RANK", "0") != "0":
        threading.Thread(
            target=_end_with, args=(int(first),), name="end-with-first", daemon=True
        ).start()
    elif parent == str(os.getppid()):  # else the program's child has handed the variable on
        threading.Thread(
            target=_end_with, args=(int(parent),), name="end-with-parent", daemon=True
        ).start()


def _end_with(pid: int) -> None:
    while os.getppid() == pid:
        time.sleep(1)
    os._exit(1)


def take_over(trainer: "pl.Trainer") -> None:
    """Let this package alone decide when a trainer's processes end."""
    ending.clear()
    launcher: Any = trainer.strategy.launcher
    if lightning_private.is_subprocess_launcher(launcher):
        if not launcher.cluster_environment.creates_processes_externally:
            os.environ[_FIRST] = str(os.getpid())
        lightning_private.set_process_observer(_observe)
    if not lightning_private.has_auto_requeue(trainer):
        lightning_private.disable_signal_handlers(trainer)


def _observe(processes: list[subprocess.Popen]) -> None:
    """End if one of them fails. Lightning's own kills this process at once, while it still speaks for all."""

    def run() -> None:
        while not any(codes := [process.poll() for process in processes]):
            if None not in codes:
                return
            time.sleep(0.5)
        rank = next(i for i, code in enumerate(codes, 1) if code)
        if (code := codes[rank - 1]) in _STOPPED:
            if ending.wait(_TIME_TO_STOP):
                return
            say(
                f"finetune: error: process {rank} was stopped, and this one would wait for it for ever"
            )
            os._exit(code)
        if ending.wait(_GRACE):
            time.sleep(_TIME_TO_STOP)  # in which it writes what waited, and tells its own error
        say(
            f"finetune: error: process {rank} ended with code {code}, and this one can't go on without it"
        )
        for process in processes:
            process.kill()
        os._exit(1)

    threading.Thread(target=run, name="observe-processes", daemon=True).start()
