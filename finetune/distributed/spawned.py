"""Processes that begin within the command, by `ddp_spawn` and `ddp_fork`: their signals, their errors and their end."""

import atexit
import logging
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial, partialmethod
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, ProcessRaisedException

from finetune.distributed.signals import Interrupted, install_stop_at_once, stop_behind, stopping
from finetune.system.killed_worker import is_of_killed_worker
from finetune.system.unraised import take_unraisable

_GRACE = 5.0  # seconds for the others to end by themselves, once one has
_join = ProcessContext.join


def take_over(launcher: Any) -> None:
    """Let this process hear the signals for the ones that it starts, and tell in one line what ends them."""
    launcher._wrapping_function = partial(_run, type(launcher)._wrapping_function, launcher)
    launcher.launch = partial(_launch, type(launcher).launch, launcher)
    # Once one has ended, torch would stop the others, which may be about to end with an error of their own.
    ProcessContext.join = partialmethod(_join, grace_period=_GRACE)  # type: ignore[method-assign, assignment]
    logging.getLogger(ProcessContext.__module__).setLevel(logging.ERROR)  # that it does so after that


def _run(function: Callable[..., None], launcher: Any, index: int, *args: Any, matmul_precision: str) -> None:
    # The terminal's Ctrl-C is for the first process alone, which hands it on: twice would mean "at once".
    os.setpgid(0, 0)
    install_stop_at_once()
    take_unraisable()
    torch.set_float32_matmul_precision(matmul_precision)
    try:
        function(launcher, index, *args)
    except BaseException as error:
        stop = stop_behind(error)
        if dist.is_initialized() and dist.get_backend() == "nccl":
            # Before Lightning's, which waits for others that wait for this one. The error is written down by then.
            atexit.register(os._exit, stop.exit_code if isinstance(stop, Interrupted) else 1)
        if isinstance(stop, Interrupted):  # which would be printed with its traceback
            for signum in stopping():
                signal.signal(signum, signal.SIG_IGN)
            sys.exit(stop.exit_code)
        # torch would say once more that a worker has died, while the news of it is written down for the first process.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if is_of_killed_worker(error):  # which may be seen by where it was raised alone, and torch hands on its text
            raise RuntimeError("DataLoader worker exited unexpectedly") from error
        raise


def _launch(function: Callable[..., Any], launcher: Any, *args: Any, **kwargs: Any) -> Any:
    received, hint = 0, {} if kwargs["trainer"].state.fn == "fit" else {"hint": ""}

    def hand_on(signum: int, frame: FrameType | None) -> None:
        nonlocal received
        is_second = received and signum == signal.SIGINT
        received = received or signum
        # By SIGTERM, which ends one that still begins without a traceback.
        for process in multiprocessing.active_children():
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(process.pid, signal.SIGKILL if is_second else signal.SIGTERM)  # type: ignore[arg-type]
        if is_second:
            os._exit(128 + signum)

    precision = torch.get_float32_matmul_precision()  # which Lightning does not hand on
    launcher._wrapping_function = partial(launcher._wrapping_function, matmul_precision=precision)
    before = {signum: signal.signal(signum, hand_on) for signum in stopping()}
    try:
        result = function(launcher, *args, **kwargs)
    except ProcessRaisedException as error:
        raise _as_raised(error) from error
    except ProcessExitedException as error:
        if signum := received or max(0, error.exit_code - 128):
            raise Interrupted(signum, **hint) from error
        raise ChildProcessError(f"{error}, and the others can't go on without it") from error
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if received:
        raise Interrupted(received, **hint)
    return result


def _as_raised(error: ProcessRaisedException) -> Exception:
    """Return the error that a process ended with, of which torch hands on the traceback's text."""
    traceback = str(error).rpartition("\nTraceback (most recent call last):\n")[2]
    told = re.split(r"\n(?=\S)", traceback, maxsplit=1)[-1]  # all else of a traceback is indented
    path, _, text = told.strip().partition(": ")
    module, _, name = path.rpartition(".")
    kind = getattr(sys.modules.get(module or "builtins"), name, None)
    if isinstance(kind, type) and issubclass(kind, (dist.DistError, MisconfigurationException)):
        return kind(text)
    if isinstance(kind, type) and issubclass(kind, (ValueError, OSError, MemoryError)):
        return next(base for base in kind.__mro__ if base.__module__ == "builtins")(text)
    return RuntimeError(text if kind is RuntimeError else f"{name}: {text}")
