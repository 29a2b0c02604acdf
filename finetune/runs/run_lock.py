"""One process at a time in a run's folder: two that go on in one run would write each other's files."""

import contextlib
import fcntl
import os
from pathlib import Path

_held: dict[Path, int] = {}  # descriptors, until `release` or this process ends; one that was killed holds nothing


def hold(run: Path) -> None:
    """Let no other process go on in a run's folder. On file systems that know no locks nothing is held.

    Raises:
        ValueError: Another process does.
    """
    path = run.resolve() / ".lock"
    if path in _held:
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        # Not flock: the workers would inherit that, and hold it a little longer than a process that was killed.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        pid = os.read(descriptor, 20).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise ValueError(f"another process, {pid}, goes on in {run}: wait for its end, or end it") from None
    except OSError:
        os.close(descriptor)
        return
    with contextlib.suppress(OSError):
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    _held[path] = descriptor


def release() -> None:
    """Let others go on in all runs that this process holds."""
    while _held:
        os.close(_held.popitem()[1])
