"""Ctrl-C, SIGTERM and SIGHUP set a flag. All ranks agree on it between steps. No exception interrupts a step."""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist

from finetune.distributed.collectives import cpu_group
from finetune.system.terminal import redirect_closed_outputs, write_line

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE = 10.0  # seconds; schedulers kill a process about 30 seconds after SIGTERM


def stop_signals() -> list[int]:
    """Return the signals that stop a command. SIGHUP is not among them if it is ignored, as under `nohup`.

    Outside the main thread the list is empty, since Python sets signal handlers only in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    is_off = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signum for signum in _SIGNALS if signum != signal.SIGHUP or not is_off]


class Interrupted(BaseException):
    """A command was stopped by a signal.

    It may be raised anywhere. It is not an `Exception`, since libraries that catch all exceptions would swallow it.

    Attributes:
        exit_code: 128 + signal number, as in shells: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP.
    """

    def __init__(
        self, signum: int, hint: str = "continue with the same command and --resume"
    ) -> None:
        super().__init__(
            f"stopped by {signal.Signals(signum).name}" + (f"; {hint}" if hint else "")
        )
        self.exit_code = 128 + signum


def find_interruption(error: BaseException) -> BaseException:
    """Return the `Interrupted` during which `error` was raised; `error` itself if there is none.

    If a signal interrupts an operation, cleaning up may fail with another error. An `OSError`, such as a full disk, is
    returned as it is, unless it is a `ConnectionError`.
    """
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        return error
    other: BaseException | None = error
    while other is not None and not isinstance(other, Interrupted):
        other = other.__cause__ or (None if other.__suppress_context__ else other.__context__)
    return other or error


def stop_at_once(signum: int, frame: FrameType | None = None) -> None:
    """Signal handler that ends the command at once, for commands that have nothing to save."""
    redirect_closed_outputs()  # a terminal that has closed, or an error of writing would hide the signal
    raise Interrupted(signum, hint="")


def install_stop_at_once() -> None:
    """Install `stop_at_once` for all stop signals."""
    for signum in stop_signals():
        signal.signal(signum, stop_at_once)


def handle_signals_while_waiting() -> None:
    """Handle signals while the next step waits for a server. To be called repeatedly.

    The handlers of blocked signals run, too: signals are blocked while workers start, which is when the first images
    are read. If the next step comes within `_PATIENCE` seconds of a signal, the fit stops after it and saves a
    checkpoint. Otherwise the steps since the last checkpoint are lost. In a fit with several processes nothing is done,
    since the other ranks would wait for this one.

    Raises:
        Interrupted: A signal was received, and the step has not come in time.
    """
    signums = stop_signals()
    if not signums:  # not the main thread
        return
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    flag = getattr(signal.getsignal(signums[0]), "__self__", None)
    if not isinstance(flag, SignalFlag) or not flag.received or flag.is_joined:
        return
    if time.monotonic() - flag.received_at >= _PATIENCE:
        raise Interrupted(flag.received)


def is_rank_zero() -> bool:
    """Return whether the environment says that this process has rank 0, or says nothing."""
    variables = ("RANK", "LOCAL_RANK", "SLURM_PROCID")  # torchrun's, Lightning's, srun's
    return next((os.environ[name] for name in variables if name in os.environ), "0") == "0"


class SignalFlag:
    """Stores the first stop signal while it is installed. A second Ctrl-C ends the process at once.

    Attributes:
        received: The signal; 0 if there was none.
        received_at: Its time, of `time.monotonic`.
        end: Called at a second Ctrl-C with the exit code. To be replaced if the process belongs to another program.
    """

    def __init__(self) -> None:
        self.end: Callable[[int], Any] = os._exit
        self.received = 0
        self.received_at = 0.0
        self._previous: dict[int, Any] = {}
        self._group: Any = None

    def install(self) -> None:
        for signum in stop_signals():
            self._previous.setdefault(signum, signal.getsignal(signum))
            signal.signal(signum, self._handle)

    @property
    def is_joined(self) -> bool:
        """Whether all ranks have to agree on a stop."""
        return self._group is not None

    def restore(self) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous = {}

    def join(self, trainer: pl.Trainer) -> None:
        """Create the process group for `agreed`. Every rank must call this at the same point.

        It communicates on CPUs, since `agreed` is called at every step.
        """
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = cpu_group(trainer.strategy)

    def agreed(self, trainer: pl.Trainer) -> int:
        """Return a signal that some rank has received, 0 for none. Every rank must call this at the same point."""
        if trainer.world_size == 1:
            return self.received
        received = torch.tensor(self.received)
        dist.all_reduce(received, dist.ReduceOp.MAX, group=self._group)
        return int(received)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received and signum == signal.SIGINT:
            self.end(128 + signum)
        if not self.received and is_rank_zero():
            what = "Ctrl-C again ends it at once" if signum == signal.SIGINT else "saving"
            write_line(f"\nstopping after this step; {what}")
        if not self.received:
            self.received_at = time.monotonic()
            self.received = signum
