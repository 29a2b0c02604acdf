"""Files that a command writes at its end: looked at before the work, replaced whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune.messages import WrongUsage


def check_target(path: str | Path, option: str) -> None:
    """Make sure, before hours of work, that a file can be written at `path`; its folder may be missing yet.

    Raises:
        WrongUsage: A folder is there, or a file where the folder should be.
        PermissionError: Nothing may be written there.
    """
    target = Path(os.path.abspath(path))
    if target.is_dir():
        raise WrongUsage(f"{option} {path} is a folder: name a file in it")
    folder = next(parent for parent in target.parents if parent.exists())
    if not folder.is_dir():
        raise WrongUsage(f"{option} {path}: {folder} is a file, not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{option} {path}: no right to write in {folder}")


@contextmanager
def replaced(target: Path) -> Iterator[Path]:
    """Give a path of the same suffix to write to; at the end it becomes `target` at once, after an error nothing."""
    temporary = target.with_name(f".tmp{os.getpid()}-{target.name}")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())  # a disk over the network may find out only now that it is full
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
