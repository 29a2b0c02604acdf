"""Files of a disk, and of a bucket by their addresses: kinds, folders, sizes and times, and opening them.

A path is text. What a bucket holds is known from its list, and its files are read from copies (see `mirror`).
"""

import errno
import hashlib
import os
import stat
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import numpy as np

from finetune.data.addresses import Address, is_address, is_in_bucket, parse_address, real_place
from finetune.data.file_entries import Entry, FileStats, Kind
from finetune.data.mirror import Mirror, fetched, list_again, mirror_of

_UNKNOWN = -1


def refresh(folder: str | os.PathLike[str]) -> None:
    """List a folder of a bucket again, before its images are searched for.

    Raises:
        StorageError: Object storage cannot be reached.
    """
    if is_in_bucket(text := os.fspath(folder)):
        list_again(text)


def _listed(path: str) -> Mirror:
    """Return the mirror of a path in a bucket, which is listed if it was not."""
    return mirror_of(path) or list_again(path)


def normal_path(path: str | os.PathLike[str]) -> str:
    """Return a path as text without redundant parts."""
    text = os.fspath(path)
    return str(parse_address(text)) if is_address(text) else str(Path(text))


def absolute_path(path: str) -> str:
    """Return a path that does not depend on the working directory."""
    return normal_path(path) if is_address(path) else os.path.abspath(path)


def is_same_place(first: str, second: str) -> bool:
    """Return whether two paths are names of the same place."""
    return real_place(first) == real_place(second)


def kind_of(path: str) -> Kind:
    """Return what is at a path."""
    if is_in_bucket(path):
        path = normal_path(path)
        return _listed(path).tree.kind(path)
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # ValueError: a zero byte
        return "link" if os.path.islink(path) else None
    if stat.S_ISDIR(mode):
        return "folder"
    return "file" if stat.S_ISREG(mode) else "other"


def entries(folder: str) -> Iterator[Entry]:
    """Yield the files and folders in a folder, in any order.

    Raises:
        OSError: The folder cannot be read.
    """
    if is_in_bucket(folder):
        folder = normal_path(folder)
        yield from _listed(folder).tree.entries(folder)
        return
    with os.scandir(folder) as found:
        for entry in found:
            try:
                is_folder = entry.is_dir()
            except OSError:  # a link to itself, which is reported when it is read
                is_folder = False
            yield Entry(entry.name, entry.path, is_folder, entry.is_symlink())


def file_stats(paths: Sequence[str], skip: bool = True) -> FileStats:
    """Return the sizes and times of files.

    Args:
        paths: The files, N.
        skip: Store -1 for a file that does not exist, which is reported when it is read. Otherwise raise.

    Raises:
        OSError: A file does not exist, and `skip` is false.
    """
    parts = [
        _object_stats(list(part), skip) if is_there else _local_stats(list(part), skip)
        for is_there, part in groupby(paths, is_in_bucket)
    ]
    return concatenate_stats(parts or [_local_stats([], skip)])


def _local_stats(paths: Sequence[str], skip: bool) -> FileStats:
    sizes = array("q")
    times = array("q")
    is_regular = array("b")
    for path in paths:
        size, both_times, regular = _status(path, skip)
        sizes.append(size)
        times.extend(both_times)
        is_regular.append(regular)
    return FileStats(
        np.array(sizes, np.int64),
        np.array(times, np.int64).reshape(-1, 2),
        np.array(is_regular, bool),
    )


def _status(path: str, skip: bool) -> tuple[int, tuple[int, ...], bool]:
    """Return the size of a file, its two times, and whether it is a regular file; see `FileStats`."""
    try:
        status = os.stat(path)
    except OSError as error:
        if not skip:
            raise _explained(error, path) from None
        return _UNKNOWN, (_UNKNOWN, _UNKNOWN), False
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return status.st_size, times, stat.S_ISREG(status.st_mode)


def _object_stats(paths: Sequence[str], skip: bool) -> FileStats:
    """Return the stats of files in buckets. Of those in no folder that was listed, the common folder is listed."""
    _list_common_folder([path for path in paths if mirror_of(path) is None])
    objects = [_listed(path).tree.objects.get(path) for path in paths]
    if not skip and None in objects:
        missing = paths[objects.index(None)]
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), missing)
    sizes = [_UNKNOWN if item is None else item.size for item in objects]
    times = [
        (_UNKNOWN, _UNKNOWN) if item is None else (item.changed, item.version()) for item in objects
    ]
    return FileStats(
        np.array(sizes, np.int64),
        np.array(times, np.int64).reshape(-1, 2),
        np.array([item is not None for item in objects], bool),
    )


def _list_common_folder(paths: Sequence[str]) -> None:
    if len(set(paths)) == 1:
        list_again(paths[0])
        return
    addresses = [parse_address(path) for path in set(paths)]
    for scheme, bucket in {(address.scheme, address.bucket) for address in addresses}:
        keys = [a.key for a in addresses if (a.scheme, a.bucket) == (scheme, bucket)]
        folders = [os.path.dirname(key) for key in keys]
        list_again(str(Address(scheme, bucket, os.path.commonpath(folders))))


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
    """Open a file for reading. One in a bucket is copied first, unless its copy is there.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It is a pipe, which would block until it is written to.
        StorageError: Object storage cannot be reached, or the file was replaced.
    """
    text = os.fspath(path)
    try:
        file = open(fetched(text), "rb", opener=_open_at_once)  # noqa: SIM115 the caller closes it
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _explained(error, text) from None
    if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError("it is a pipe, not a file")
    return file


def read_pieces(
    path: str, num_bytes: int, starts: Callable[[int], Sequence[int]]
) -> tuple[int, list[bytes]]:
    """Return the size of a file and pieces of it. Nothing else is read, and nothing is copied from a bucket.

    Args:
        path: The file.
        num_bytes: Size of each piece, at most: the file may end before.
        starts: Returns where the pieces start, from the size of the file.

    Raises:
        OSError: The file cannot be read.
        StorageError: Object storage cannot be reached.
    """
    mirror = mirror_of(path) if is_in_bucket(path) else None
    if mirror is not None and mirror.holds(path) and not mirror.has(path):
        return mirror.read_pieces(path, num_bytes, starts)
    try:
        descriptor = _open_at_once(fetched(path), os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _explained(error, path) from None
    try:
        size = os.fstat(descriptor).st_size
        return size, [os.pread(descriptor, num_bytes, start) for start in starts(size)]
    finally:
        os.close(descriptor)


def _explained(error: OSError, path: str) -> OSError:
    """Return the error of a file that cannot be opened, which names a dangling link as such."""
    if isinstance(error, FileNotFoundError) and os.path.islink(path):
        return FileNotFoundError(error.errno, "The target of this link does not exist", path)
    return error


def _open_at_once(path: str, flags: int) -> int:
    # reading a pipe would otherwise block until it is written to
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
