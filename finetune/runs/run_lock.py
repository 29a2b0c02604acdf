"""One process at a time in a run's folder: two that go on in one run would write each other's files."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

# descriptors, until `release` or this process ends; one that was killed holds nothing
_held: dict[Path, int] = {}


def hold(run: Path) -> None:
    """Let no other process go on in a run's folder. On file systems that know no locks nothing is held.

    Raises:
        ValueError: Another process does.
    """
    path = run.resolve() / ".lock"
    if (
        path in _held
        or (descriptor := _locked(path, run, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)) is None
    ):
        return
    with contextlib.suppress(OSError):
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    _held[path] = descriptor


def check_free(run: Path) -> None:
    """Make sure that no other process goes on in a run's folder; several may look at once.

    Raises:
        ValueError: One does.
    """
    path = run.resolve() / ".lock"
    if path in _held or not path.exists():  # closing it would let others have what is held
        return
    if (descriptor := _locked(path, run, os.O_RDONLY, fcntl.LOCK_SH)) is not None:
        os.close(descriptor)


def is_held(run: Path) -> bool:
    """Return whether a process, be it this one, goes on in a run's folder."""
    if run.resolve() / ".lock" in _held:
        return True
    try:
        check_free(run)
    except ValueError:
        return True
    except OSError:  # another user's, who alone may look
        return False
    return False


def _locked(path: Path, run: Path, flags: int, kind: int) -> int | None:
    """Return the descriptor of a lock that this process has now; None on file systems that know no locks."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        # Not flock: the workers would inherit that, and hold it a little longer than a process that was killed.
        fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        pid = os.read(descriptor, 20).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise ValueError(
            f"another process, {pid}, goes on in {run}: wait for its end, or end it"
        ) from None
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


@contextlib.contextmanager
def holding(run: Path) -> Iterator[None]:
    """Let no other process go on in a run's folder meanwhile.

    Raises:
        ValueError: Another process does.
    """
    is_held_already = run.resolve() / ".lock" in _held
    hold(run)
    try:
        yield
    finally:
        if not is_held_already:
            release_run(run)


def release_run(run: Path) -> None:
    """Let others go on in one run, if this process holds it."""
    descriptor = _held.pop(run.resolve() / ".lock", None)
    if descriptor is not None:
        os.close(descriptor)


def release() -> None:
    """Let others go on in all runs that this process holds."""
    while _held:
        os.close(_held.popitem()[1])
