"""Storage of images: listing folders, stats of files, and opening them.

There are two kinds: `LocalStorage`, for paths, and `object_storage.ObjectStorage`, for addresses such as
s3://bucket/folder. Another kind is a class with the methods of `file_entries.Storage` and an entry in `STORAGES`. All
other modules use a path as text and ask `storage_of` for its storage.
"""

import hashlib
import os
import stat
from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import numpy as np

from finetune.data.addresses import (
    check_address,
    is_address,
    is_dataset,
    is_in_bucket,
    parse_address,
    real_place,
)
from finetune.data.file_entries import Entry, FileStats, Kind, Starts, Storage

_UNKNOWN = -1


class LocalStorage:
    """Files of this machine, and of disks that are mounted."""

    def refresh(self, folder: str) -> None:
        pass

    def normal(self, path: str) -> str:
        return str(Path(path))

    def absolute(self, path: str) -> str:
        return os.path.abspath(path)

    def resolved(self, path: str) -> str:
        return os.path.realpath(path)

    def kind(self, path: str) -> Kind:
        try:
            mode = os.stat(path).st_mode
        except (OSError, ValueError):  # ValueError: a zero byte
            return "link" if os.path.islink(path) else None
        if stat.S_ISDIR(mode):
            return "folder"
        return "file" if stat.S_ISREG(mode) else "other"

    def entries(self, folder: str) -> Iterator[Entry]:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    is_folder = entry.is_dir()
                except OSError:  # a link to itself, which is reported when it is read
                    is_folder = False
                yield Entry(entry.name, entry.path, is_folder, entry.is_symlink())

    def stats(self, paths: Sequence[str], skip: bool) -> FileStats:
        sizes = array("q")
        times = array("q")
        is_regular = array("b")
        for path in paths:
            size, both_times, regular = self._status(path, skip)
            sizes.append(size)
            times.extend(both_times)
            is_regular.append(regular)
        return FileStats(
            np.array(sizes, np.int64),
            np.array(times, np.int64).reshape(-1, 2),
            np.array(is_regular, bool),
        )

    def _status(self, path: str, skip: bool) -> tuple[int, tuple[int, ...], bool]:
        """Return the size of a file, its two times, and whether it is a regular file; see `FileStats`."""
        try:
            status = os.stat(path)
        except OSError as error:
            if not skip:
                raise _explained(error, path) from None
            return _UNKNOWN, (_UNKNOWN, _UNKNOWN), False
        times = (status.st_mtime_ns, status.st_ctime_ns)
        return status.st_size, times, stat.S_ISREG(status.st_mode)

    def open_file(self, path: str) -> BinaryIO:
        try:
            file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 the caller closes it
        except (FileNotFoundError, NotADirectoryError) as error:
            raise _explained(error, path) from None
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            file.close()
            raise ValueError("it is a pipe, not a file")
        return file

    def read_pieces(self, path: str, num_bytes: int, starts: Starts) -> tuple[int, list[bytes]]:
        try:
            descriptor = _open_at_once(path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise _explained(error, path) from None
        try:
            size = os.fstat(descriptor).st_size
            return size, [os.pread(descriptor, num_bytes, start) for start in starts(size)]
        finally:
            os.close(descriptor)

    def results(self, path: str) -> None:
        return None


def _explained(error: OSError, path: str) -> OSError:
    """Return the error of a file that cannot be opened, which names a dangling link as such."""
    if isinstance(error, FileNotFoundError) and os.path.islink(path):
        return FileNotFoundError(error.errno, "The target of this link does not exist", path)
    return error


def _open_at_once(path: str, flags: int) -> int:
    # reading a pipe would otherwise block until it is written to
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


LOCAL = LocalStorage()
# By the scheme of their paths, such as s3. They are added when they are first used.
STORAGES: dict[str, Storage] = {}


def storage_of(path: str) -> Storage:
    """Return the storage of a path, by its scheme.

    Raises:
        WrongUsage: The path is an address, and the extra for its storage is not installed.
    """
    scheme, separator, _ = path.partition("://")
    if not separator:
        return LOCAL
    if scheme not in STORAGES and is_in_bucket(path):
        check_address(path)
        # imported here, because fits on local folders do not need obstore
        from finetune.data.object_storage import ObjectStorage

        STORAGES[scheme] = ObjectStorage()
    return STORAGES.get(scheme, LOCAL)


def is_local(path: str) -> bool:
    """Return whether a file is on a disk of this machine, so that any process may open it."""
    return "://" not in path or storage_of(path) is LOCAL


def refresh(folder: str | os.PathLike[str]) -> None:
    """Discard what is cached about a folder, before its images are searched for.

    Raises:
        StorageError: Object storage cannot be reached.
    """
    text = os.fspath(folder)
    storage_of(text).refresh(text)


def normal_path(path: str | os.PathLike[str]) -> str:
    """Return a path as text without redundant parts."""
    text = os.fspath(path)
    return str(parse_address(text)) if is_dataset(text) else storage_of(text).normal(text)


def kind_of(path: str) -> Kind:
    """Return what is at a path."""
    return storage_of(path).kind(path)


def is_same_place(first: str, second: str) -> bool:
    """Return whether two paths are names of the same place."""
    return _resolved(first) == _resolved(second)


def _resolved(path: str) -> str:
    # of a checkpoint, perhaps, whose address is compared but not used
    return real_place(path) if is_address(path) else storage_of(path).resolved(path)


def file_stats(paths: Sequence[str], skip: bool = True) -> FileStats:
    """Return the sizes and times of files.

    Args:
        paths: The files, N.
        skip: Store -1 for a file that does not exist, which is reported when it is read. Otherwise raise.

    Raises:
        OSError: A file does not exist, and `skip` is false.
    """
    if not len(paths):
        return LOCAL.stats(paths, skip)
    parts = groupby(paths, storage_of)
    return concatenate_stats([storage.stats(list(part), skip) for storage, part in parts])


def concatenate_stats(parts: Sequence[FileStats]) -> FileStats:
    """Return the stats of all parts, in their order."""
    return FileStats(
        np.concatenate([part.sizes for part in parts]),
        np.concatenate([part.times for part in parts]),
        np.concatenate([part.is_regular for part in parts]),
    )


def files_digest(paths: Sequence[str], stats: FileStats, root: str | os.PathLike[str]) -> str:
    """Return a hash of the relative path, size and change times of every file, in this order.

    Programs can set `st_mtime`, and copying may preserve it. The file system sets `st_ctime` at every change of
    content, name or permissions, and not when a file is read. So a replaced file is noticed even if size and `st_mtime`
    are the same. Exceptions are file systems without `st_ctime` (FAT, some network mounts) and a clock that was set
    back. The inode (`st_ino`) would not detect more, and some mounts assign new inodes each time.
    """
    digest = hashlib.sha256()
    prefix = os.path.join(normal_path(root), "")
    for path, size, (changed, renamed) in zip(
        paths, stats.sizes.tolist(), stats.times.tolist(), strict=True
    ):
        row = f"{path.removeprefix(prefix)}\0{size}\0{changed}\0{renamed}\n"
        digest.update(row.encode(errors="surrogateescape"))
    return digest.hexdigest()


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It is a pipe, which would block until it is written to.
    """
    text = os.fspath(path)
    return storage_of(text).open_file(text)


def read_pieces(path: str, num_bytes: int, starts: Starts) -> tuple[int, list[bytes]]:
    """Return the size of a file and pieces of it. Nothing else is read.

    Args:
        path: The file.
        num_bytes: Size of each piece, at most: the file may end before.
        starts: Returns where the pieces start, from the size of the file.

    Raises:
        OSError: The file cannot be read.
    """
    return storage_of(path).read_pieces(path, num_bytes, starts)
