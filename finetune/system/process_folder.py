"""A folder for the files of this process alone, which is deleted at its end, or after a kill by the next process."""

import atexit
import fcntl
import os
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from finetune.system.files import lock_if_supported, one_at_a_time

PREFIX = ".process-"
_LOCK = ".lock"
_lock = threading.Lock()
_folders: dict[tuple[Path, int], Path] = {}


def process_folder(parent: Path) -> Path:
    """Return the folder of this process in `parent`. The first call makes it, and deletes those of ended processes.

    A process holds a lock in its folder. Its number would not do: containers that share a disk have the same ones. On
    file systems without locks nothing is deleted after a kill.

    Raises:
        OSError: It cannot be made.
    """
    key = (parent, os.getpid())
    with _lock:
        if key not in _folders:
            with one_at_a_time(parent / "processes"):
                remove_ended(parent)
                folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
                # open until the process ends
                descriptor = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR)
                lock_if_supported(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            atexit.register(_remove, folder, os.getpid())
            _folders[key] = folder
        return _folders[key]


def remove_ended(parent: Path) -> None:
    """Delete the folders of processes that have ended."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # BlockingIOError: it runs; PermissionError: of another user
            descriptor = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR)
            try:
                if lock_if_supported(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not a forked worker
        shutil.rmtree(folder, ignore_errors=True)
