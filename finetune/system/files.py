"""Write files atomically, by one process at a time, and remove temporary files that killed processes have left."""

import errno
import fcntl
import glob
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from finetune.system.messages import WrongUsage

_ABANDONED_AFTER = 24 * 3600  # seconds without a write
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")  # of `replacing`
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_LFS = b"version https://git-lfs.github.com/spec/"


def check_no_lfs_pointer(path: str | Path) -> None:
    """Make sure that a file is not a Git LFS pointer, as in a clone without Git LFS.

    Raises:
        ValueError: It is a pointer.
    """
    with open(path, "rb") as file:
        if file.read(len(_LFS)) == _LFS:
            raise ValueError(
                f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository"
            )


def check_target(path: str | Path, option: str) -> None:
    """Make sure, before hours of work, that a file can be written at `path`. Its folder need not exist yet.

    Raises:
        WrongUsage: The path is a folder, a pipe or a device, or its parent is a file.
        PermissionError: The folder is not writable.
    """
    target = Path(os.path.abspath(path))
    if target.is_dir():
        raise WrongUsage(f"{option} {path} is a folder: name a file in it")
    # a pipe, a device, or a link to one
    if target.exists() and (not target.is_file() or target.parent == Path("/dev")):
        raise WrongUsage(
            f"{option} {path} is not a file that can be replaced: pass the name of a file"
        )
    # follow links
    folder = next(parent for parent in Path(os.path.realpath(target)).parents if parent.exists())
    if not folder.is_dir():
        raise WrongUsage(f"{option} {path}: {folder} is a file, not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{option} {path}: no right to write in {folder}")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path next to `target` to write to; at the end, rename it to `target` atomically.

    After an error, `target` is unchanged. Readers see the old file or the new one, never a part, also after a kill or
    on a full disk: the content is synced before the rename. If `target` is a symbolic link, the file that it points to
    is replaced. The new file keeps the mode and the owner of the old one.
    """
    target = Path(os.path.realpath(target))
    before = _status(target)
    # Not the process number: containers that share a disk have the same ones.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        if before is not None:
            temporary.touch(mode=0o600, exist_ok=False)  # the old file may be private
        yield temporary
        _move_into_place(temporary, target, before)
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(target)  # a failed write does not set it
        raise
    finally:
        # a rename does nothing if both names are hard links to one file
        temporary.unlink(missing_ok=True)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _move_into_place(path: Path, target: Path, before: os.stat_result | None) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())  # a network disk may report only now that it is full
    if before is not None:
        with suppress(OSError):  # only root may give a file to another user
            os.chown(path, before.st_uid, before.st_gid)
        with suppress(OSError):  # some file systems have no modes
            path.chmod(stat.S_IMODE(before.st_mode))
    os.replace(path, target)  # noqa: TID251
    with suppress(OSError):  # sync the rename; not every file system supports it
        descriptor = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def unfinished(target: Path) -> list[Path]:
    """Return the temporary files that killed processes have left of `target`."""
    target = Path(os.path.realpath(target))
    return unfinished_matching(target.parent, glob.escape(target.name))


def unfinished_matching(folder: Path, pattern: str) -> list[Path]:
    """Return the temporary files that killed processes have left of the files in a folder that match a pattern."""
    return [path for path in folder.glob(f".{pattern}.*.tmp") if is_unfinished(path)]


def is_unfinished(path: Path) -> bool:
    """Return whether a path is that of a temporary file, which is later to replace another file."""
    return _TEMPORARY.fullmatch(path.name) is not None


def remove_dead(paths: Iterable[Path]) -> None:
    """Remove temporary files that were not written to for a day, since a killed process has left them."""
    for path in paths:
        with suppress(OSError):  # removed already, or owned by another user
            if time.time() - path.stat().st_mtime > _ABANDONED_AFTER:
                path.unlink()


def replace_text(path: Path, text: str, errors: str = "strict") -> None:
    """Write a text file by `replacing`.

    Args:
        path: The file.
        text: Its new content.
        errors: Error handler of the encoding, such as `surrogateescape` for file names that are not UTF-8.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors=errors)


def link(source: Path, target: Path) -> None:
    """Replace `target` atomically by a hard link to `source`, or by a copy if the file system has no hard links.

    Only one process at a time may call this for a target: it removes all temporary files of the target.
    """
    for leftover in unfinished(target):
        leftover.unlink(missing_ok=True)
    with replacing(target) as temporary:
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)


def lock_if_supported(descriptor: int, operation: int) -> bool:
    """Lock an open file by `fcntl.flock`, and return whether its file system has locks, unlike some network mounts.

    Raises:
        BlockingIOError: Another process holds the lock, and the operation includes `fcntl.LOCK_NB`.
    """
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        return False
    return True


def rename_folder(folder: Path, target: Path) -> None:
    """Give a complete folder its name, unless another process has made `target` by then, on a disk without locks."""
    try:
        folder.rename(target)
    except OSError:
        if not target.exists():
            raise


@contextmanager
def one_at_a_time(target: Path) -> Iterator[None]:
    """Hold a lock while this process makes `target`, on all machines that share the disk.

    Another process may have made `target` during the wait: the caller must look again. On file systems without locks
    there is none. Then several processes may make it at once: of a file the last one stays, of a folder the first
    (`rename_folder`).
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    path = target.with_name(f".{target.name}.lock")
    while True:
        with open(path, "ab") as file:
            lock_if_supported(file.fileno(), fcntl.LOCK_EX)
            # if the process before has deleted it, another one locks a new file
            if _is_at(path, file):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)  # before the release
                return


def _is_at(path: Path, file: IO[bytes]) -> bool:
    """Return whether a path is that of an open file."""
    now = _status(path)
    return now is not None and os.path.samestat(now, os.fstat(file.fileno()))
