"""Faults of writing: something happens before each call of the system that writes, or before one of them.

`python faults.py FAULT NUMBER COUNT ARGUMENTS…` is `finetune ARGUMENTS` with a fault at the call of this number, of all
processes of the command together. The file COUNT gets a byte for each call.
"""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

CALLS = ("replace", "fsync", "open", "link", "chown")  # of the system, without its reads
PAUSE = 2  # seconds


@contextmanager
def before_each_write(act: Callable[[], None]) -> Iterator[None]:
    """Do something before each call that writes."""

    def call(original: Callable[..., Any], *given: Any, **more: Any) -> Any:
        flags = given[1] if original is own_open and len(given) > 1 else os.O_WRONLY
        if flags & (os.O_WRONLY | os.O_RDWR):
            act()
        return original(*given, **more)

    own_open = os.open
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, partial(call, getattr(os, name)))
        yield


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def pause() -> None:
    """Stop this process, which another one continues after some seconds."""
    subprocess.Popen(["sh", "-c", f"sleep {PAUSE}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def go_back_in_time() -> None:
    """Set Python's clock back by an hour."""
    now = time.time
    time.time = lambda: now() - 3600


FAULTS = {"kill": kill, "fail": fail, "clock": go_back_in_time, "pause": pause}


def at_number(fault: str, number: int, count: int) -> None:
    """Count a call in an open file, and apply the fault if it is the one of this number; a full disk stays full."""
    num = os.fstat(count).st_size
    os.write(count, b"x")
    if num == number or (num > number >= 0 and fault == "fail"):
        FAULTS[fault]()


if __name__ == "__main__":
    from forked import become_finetune

    name, wanted, path, *arguments = sys.argv[1:]
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with before_each_write(partial(at_number, name, int(wanted), file)):
        become_finetune(arguments)
