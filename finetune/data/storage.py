"""Storage of images: listing folders, stats of files, and opening them.

There are three kinds:

- `LocalStorage`, for paths.
- `object_storage.ObjectStorage`, for addresses such as s3://bucket/folder.
- `hub_storage.HubStorage`, for datasets of the Hugging Face hub.

All but the first are imported when they are needed. Another kind is a class with the methods of `Storage` and an entry
in `STORAGES`. All other modules use a path as text and ask `storage_of` for its storage.
"""

import hashlib
import importlib
import os
import stat
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

import numpy as np

from finetune.data.addresses import check_address, is_address, real_place

_UNKNOWN = -1

# "link" is a dangling link, "other" for example a pipe; None if there is nothing
Kind = Literal["folder", "file", "link", "other"] | None
# From the size of a file to the places where pieces of it start.
Starts = Callable[[int], Sequence[int]]


@dataclass(frozen=True)
class FileStats:
    """Sizes and times of N files.

    Attributes:
        sizes: Size of each file in bytes, (N,) int64; -1 if it does not exist.
        times: Two times of each file that change with its content, (N, 2) int64; -1 if it does not exist. Those of a
            local file are `st_mtime_ns` and `st_ctime_ns`.
        is_regular: Whether it is a regular file, not a folder or a pipe, (N,) bool.
    """

    sizes: np.ndarray
    times: np.ndarray
    is_regular: np.ndarray

    def take(self, rows: np.ndarray) -> "FileStats":
        """Return the stats of the files at `rows`, in that order."""
        return FileStats(self.sizes[rows], self.times[rows], self.is_regular[rows])


class Entry(NamedTuple):
    """A file or folder in a folder. `is_folder` is also true for a link to a folder."""

    name: str
    path: str
    is_folder: bool
    is_link: bool


class Storage(Protocol):
    """A place of files. Paths are text, with / between their parts. It is used in threads.

    Forked workers use only `LocalStorage`. They get the content of other files from the main process.
    """

    def refresh(self, folder: str) -> None:
        """Forget what is known of a folder. Object storage lists it again, with all subfolders."""

    def normal(self, path: str) -> str:
        """Return a path in the form that messages and the paths of `entries` have, without redundant parts."""

    def absolute(self, path: str) -> str:
        """Return a path that does not depend on the working directory."""

    def resolved(self, path: str) -> str:
        """Return the absolute path without links, which is the same for all names of one place."""

    def kind(self, path: str) -> Kind:
        """Return what is at a path."""

    def entries(self, folder: str) -> Iterator[Entry]:
        """Yield the files and folders in a folder, in any order.

        Raises:
            OSError: The folder cannot be read.
        """

    def stats(self, paths: Sequence[str], skip: bool) -> FileStats:
        """Return the stats of files; see `file_stats`. Listing their folders may be faster than asking for each."""

    def open_file(self, path: str) -> BinaryIO:
        """Open a file for reading; see `open_file` below."""

    def read_pieces(self, path: str, num_bytes: int, starts: Starts) -> tuple[int, list[bytes]]:
        """Return the size of a file and pieces of it; see `read_pieces` below."""

    def results(self, path: str) -> dict[str, Any] | None:
        """Return a dict in which results about the content of a file are cached; None if they must not be.

        It is emptied when the folder is listed again. Results are not cached if reading the file is cheap, or if it
        may have changed since.
        """

    def commit(self, path: str) -> str:
        """Return the commit at which the files of a folder are read; "" if the place has none."""


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

    def commit(self, path: str) -> str:
        return ""


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
# The module and the class of the schemes that are not those of object storage.
_CLASSES = {
    "hf": ("hub_storage", "HubStorage"),
}


def storage_of(path: str) -> Storage:
    """Return the storage of a path, by its scheme.

    Raises:
        WrongUsage: The path is an address, and the extra for its storage is not installed.
    """
    scheme, separator, _ = path.partition("://")
    if not separator:
        return LOCAL
    if scheme not in STORAGES and is_address(path):
        check_address(path)
        # imported here, because fits on local folders do not need obstore
        module, name = _CLASSES.get(scheme, ("object_storage", "ObjectStorage"))
        STORAGES[scheme] = getattr(importlib.import_module(f"finetune.data.{module}"), name)()
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
    return storage_of(text).normal(text)


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
