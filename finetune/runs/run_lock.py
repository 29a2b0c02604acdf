"""A lock on a run's folder: two processes that continue the same run would overwrite each other's files."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

# Open file descriptors of the locks, until `release`. The system frees the locks of a process that ends.
_held: dict[Path, int] = {}


def hold(run: Path) -> None:
    """Lock a run's folder for this process. On file systems without locks this does nothing.

    Raises:
        ValueError: Another process holds the lock.
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
    """Check that no other process holds the lock of a run's folder. Several processes may check at once.

    Raises:
        ValueError: Another process holds it.
    """
    path = run.resolve() / ".lock"
    # Closing another descriptor of the file would release a lock that this process holds.
    if path in _held or not path.exists():
        return
    if (descriptor := _locked(path, run, os.O_RDONLY, fcntl.LOCK_SH)) is not None:
        os.close(descriptor)


def is_held(run: Path) -> bool:
    """Return whether a process, perhaps this one, holds the lock of a run's folder."""
    if run.resolve() / ".lock" in _held:
        return True
    try:
        check_free(run)
    except ValueError:
        return True
    except OSError:  # the file belongs to another user and is not readable
        return False
    return False


def _locked(path: Path, run: Path, flags: int, kind: int) -> int | None:
    """Lock a file, and return its descriptor; None on file systems without locks.

    Raises:
        ValueError: Another process holds the lock.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        # Not flock: workers would inherit it, and hold it for a moment after the main process was killed.
        fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        pid = os.read(descriptor, 20).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise ValueError(
            f"another process, {pid}, is writing {run}: wait for its end, or end it"
        ) from None
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


@contextlib.contextmanager
def holding(run: Path) -> Iterator[None]:
    """Hold the lock of a run's folder within the context.

    Raises:
        ValueError: Another process holds it.
    """
    is_held_already = run.resolve() / ".lock" in _held
    hold(run)
    try:
        yield
    finally:
        if not is_held_already:
            release_run(run)


def release_run(run: Path) -> None:
    """Release the lock of one run, if this process holds it."""
    descriptor = _held.pop(run.resolve() / ".lock", None)
    if descriptor is not None:
        os.close(descriptor)


def release() -> None:
    """Release all locks of this process."""
    while _held:
        os.close(_held.popitem()[1])
