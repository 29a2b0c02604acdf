"""A lock on a run's folder: two processes that continue the same run would overwrite each other's files."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from finetune.system.files import unfinished_matching

# Names of the files in the folder of a run that are locked.
LOCK = ".lock"
CHILDREN_LOCK = ".children.lock"
# Open file descriptors of the locks, until `release`. The system frees the locks of a process that ends.
_held: dict[Path, int] = {}
# Descriptors of other files for child processes, which keep this second lock as long as one of them lives.
_inherited: dict[Path, int] = {}
_LONGEST_END = 30.0  # seconds until the children of a killed process have ended
# Seconds for which a process that looks whether a run is written may have its lock.
_LONGEST_LOOK = 1.0


def hold(run: Path) -> None:
    """Lock a run's folder for this process, and remove the temporary files that a killed process has left in it.

    On file systems without locks this does nothing.

    Raises:
        ValueError: Another process holds the lock.
    """
    path = run.resolve() / LOCK
    if path in _held:
        return
    descriptor = _locked(path, run, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX, _LONGEST_LOOK)
    if descriptor is None:
        return
    with contextlib.suppress(OSError):
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    _held[path] = descriptor
    for folder in (run, run / "checkpoints"):
        for leftover in unfinished_matching(folder, "*"):
            with contextlib.suppress(OSError):  # owned by another user
                leftover.unlink()


def check_free(run: Path) -> None:
    """Check that no other process holds the lock of a run's folder. Several processes may check at once.

    Raises:
        ValueError: Another process holds it.
    """
    path = run.resolve() / LOCK
    # Closing another descriptor of the file would release a lock that this process holds.
    if path in _held or not path.exists():
        return
    if (descriptor := _locked(path, run, os.O_RDONLY, fcntl.LOCK_SH, 0.0)) is not None:
        os.close(descriptor)


def is_held(run: Path) -> bool:
    """Return whether a process, perhaps this one, holds the lock of a run's folder."""
    if run.resolve() / LOCK in _held:
        return True
    try:
        check_free(run)
    except ValueError:
        return True
    except OSError:  # the file belongs to another user and is not readable
        return False
    return False


def _locked(path: Path, run: Path, flags: int, kind: int, seconds: float) -> int | None:
    """Lock a file, and return its descriptor; None on file systems without locks.

    Raises:
        ValueError: Another process holds the lock, and has not released it within `seconds`.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + seconds
    while True:
        try:
            # Not flock: workers would inherit it, and hold it for a moment after the main process was killed.
            fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
            return descriptor
        except (BlockingIOError, PermissionError):
            if time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            pid = os.read(descriptor, 20).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise ValueError(
                f"another process, {pid}, is writing {run}: wait for its end, or end it"
            ) from None
        except OSError:
            os.close(descriptor)
            return None


@contextlib.contextmanager
def holding(run: Path) -> Iterator[None]:
    """Hold the lock of a run's folder within the context.

    Raises:
        ValueError: Another process holds it.
    """
    is_held_already = run.resolve() / LOCK in _held
    hold(run)
    try:
        yield
    finally:
        if not is_held_already:
            release_run(run)


def wait_for_children(run: Path) -> None:
    """Wait until the child processes of an earlier command that wrote this run have ended, and do as its only command.

    They end by themselves soon after that command was killed. Without this, they might still write while new ones
    begin. On file systems without such locks this does nothing.

    Args:
        run: Its lock is held by this process. Child processes get `descriptors_for_children`.

    Raises:
        ValueError: They have not ended after 30 seconds.
    """
    path = run.resolve() / CHILDREN_LOCK
    if path in _inherited:
        return
    # Unlike locks of `lockf`, those of `flock` are inherited. The file is another one, since NFS combines both kinds.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    _inherited[path] = descriptor
    deadline = time.monotonic() + _LONGEST_END
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"processes of an earlier command still write {run}: wait for their end, or end them"
                ) from None
            time.sleep(0.1)
        except OSError:
            return


def descriptors_for_children(run: Path) -> tuple[int, ...]:
    """Return the descriptors that the child processes which write a run must inherit; see `wait_for_children`."""
    descriptor = _inherited.get(run.resolve() / CHILDREN_LOCK)
    return () if descriptor is None else (descriptor,)


def release_run(run: Path) -> None:
    """Release the locks of one run, if this process holds them."""
    for locks, name in ((_held, LOCK), (_inherited, CHILDREN_LOCK)):
        descriptor = locks.pop(run.resolve() / name, None)
        if descriptor is not None:
            os.close(descriptor)


def release() -> None:
    """Release all locks of this process."""
    for locks in (_held, _inherited):
        while locks:
            os.close(locks.popitem()[1])
