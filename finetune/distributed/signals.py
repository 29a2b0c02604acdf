"""Ctrl-C, SIGTERM and SIGHUP: a flag that all devices agree on between steps, never an exception inside one."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist

from finetune.distributed.collectives import cpu_group
from finetune.system.terminal import say

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stopping() -> list[int]:
    """Return the signals that stop a command: what `nohup` has turned off stays off.

    Beside the main thread there are none, since Python sets handlers there alone: they stay whoever's they are.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    is_off = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signum for signum in _SIGNALS if signum != signal.SIGHUP or not is_off]


class Interrupted(BaseException):
    """A command was stopped by a signal.

    It may be raised anywhere: as an Exception, what a library tries and gives up would swallow it.

    Attributes:
        exit_code: 128 + signal number, as shells have it: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP.
    """

    def __init__(self, signum: int, hint: str = "the same command with --resume goes on") -> None:
        super().__init__(
            f"stopped by {signal.Signals(signum).name}" + (f"; {hint}" if hint else "")
        )
        self.exit_code = 128 + signum


def stop_behind(error: BaseException) -> BaseException:
    """Return the `Interrupted` during which `error` was raised, else `error`.

    What a signal breaks off half begun may fail to end, such as a display. A disk that is full stays the news.
    """
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        return error
    other: BaseException | None = error
    while other is not None and not isinstance(other, Interrupted):
        other = other.__cause__ or (None if other.__suppress_context__ else other.__context__)
    return other or error


def stop_at_once(signum: int, frame: FrameType | None = None) -> None:
    """End the command from a signal handler: right wherever there is nothing to save."""
    raise Interrupted(signum, hint="")


def install_stop_at_once() -> None:
    """Let the first of the signals end the command."""
    for signum in stopping():
        signal.signal(signum, stop_at_once)


def stop_if_asked() -> None:
    """End a fit of one process that a `SignalFlag` was to stop after the step, where there is no step to wait for.

    With several processes the others would wait for this one.

    Raises:
        Interrupted: A signal has come.
    """
    for signum in stopping():
        flag = getattr(signal.getsignal(signum), "__self__", None)
        if isinstance(flag, SignalFlag) and flag.received and not flag.is_joined:
            raise Interrupted(flag.received)


class StopAtOnce(pl.Callback):
    """Ends evaluation and prediction at the first signal; Lightning's own handlers exit with 0 or 1, or hang."""

    def _install(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.state.fn != "fit":
            install_stop_at_once()

    on_validation_start = on_test_start = on_predict_start = _install  # type: ignore[assignment]


def is_first_process() -> bool:
    """Return whether this process speaks for all: its rank is 0, as its starter's variables have it."""
    variables = ("RANK", "LOCAL_RANK", "SLURM_PROCID")  # torchrun's, Lightning's, srun's
    return next((os.environ[name] for name in variables if name in os.environ), "0") == "0"


class SignalFlag:
    """Remembers the first of the signals while installed; a second Ctrl-C ends the process at once.

    Attributes:
        end: What a second Ctrl-C does, given 128 and its number; may be set where the process is another's.
    """

    def __init__(self) -> None:
        self.end: Callable[[int], Any] = os._exit
        self.received = 0
        self._previous: dict[int, Any] = {}
        self._group: Any = None

    def install(self) -> None:
        for signum in stopping():
            self._previous.setdefault(signum, signal.getsignal(signum))
            signal.signal(signum, self._handle)

    @property
    def is_joined(self) -> bool:
        """Whether other processes are to agree on a stop."""
        return self._group is not None

    def restore(self) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous = {}

    def join(self, trainer: pl.Trainer) -> None:
        """Open the group that `agreed` speaks through; every device calls this at the same point.

        Through the CPUs, since it is asked at every step.
        """
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = cpu_group(trainer.strategy)

    def agreed(self, trainer: pl.Trainer) -> int:
        """Return the signal that any device has received, 0 for none; every device calls this at the same point."""
        if trainer.world_size == 1:
            return self.received
        received = torch.tensor(self.received)
        dist.all_reduce(received, dist.ReduceOp.MAX, group=self._group)
        return int(received)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received and signum == signal.SIGINT:
            self.end(128 + signum)
        if not self.received and is_first_process():
            what = "Ctrl-C again ends it at once" if signum == signal.SIGINT else "saving"
            say(f"\nstopping after this step; {what}")
        self.received = self.received or signum
