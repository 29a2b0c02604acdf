"""Image files: kinds, folders, sizes and times, and opening them. A path is text.

The path of an object in a bucket is its address, after its folder was listed (see `mirror`).
"""

import errno
import hashlib
import os
import stat
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, NamedTuple

from finetune.data.addresses import is_address, parse_address
from finetune.data.mirror import copied, listed, mirror_of

if TYPE_CHECKING:  # a command line is checked without it
    import numpy as np

# Bytes of an object that is copied where pieces of it are wanted: one request instead of three.
_SMALL_BYTES = 2**16

# "link" is a dangling link, "other" for example a pipe; None if there is nothing
Kind = Literal["folder", "file", "link", "other"] | None


class Entry(NamedTuple):
    """A file or folder in a folder. `is_folder` is also true for a link to a folder."""

    name: str
    path: str
    is_folder: bool
    is_link: bool


@dataclass(frozen=True)
class FileStats:
    """Sizes and times of N files.

    Attributes:
        sizes: Size of each file in bytes, (N,) int64; -1 if it does not exist.
        times: Two numbers of each file that change with its content, (N, 2) int64; -1 if it does not exist. Those of a
            local file are `st_mtime_ns` and `st_ctime_ns`, those of an object its time and a digest of its ETag.
        is_regular: Whether it is a regular file, not a folder or a pipe, (N,) bool.
    """

    sizes: "np.ndarray"
    times: "np.ndarray"
    is_regular: "np.ndarray"

    def take(self, rows: "np.ndarray") -> "FileStats":
        """Return the stats of the files at `rows`, in that order."""
        return FileStats(self.sizes[rows], self.times[rows], self.is_regular[rows])


def normal_path(path: str | os.PathLike[str]) -> str:
    """Return a path as text without redundant parts."""
    text = os.fspath(path)
    return str(parse_address(text)) if is_address(text) else str(Path(text))


def absolute_path(path: str) -> str:
    """Return a path that does not depend on the working directory."""
    return normal_path(path) if is_address(path) else os.path.abspath(path)


def kind_of(path: str) -> Kind:
    """Return what is at a path."""
    mirror = mirror_of(path)
    if mirror is not None:
        if path in mirror.objects:
            return "file"
        return "folder" if path in mirror.folders else None
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
    mirror = mirror_of(folder)
    if mirror is not None and folder in mirror.folders:
        for path in mirror.folders[folder]:
            is_folder = path not in mirror.objects
            yield Entry(os.path.basename(path), path, is_folder, is_link=False)
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
    numbers = array("q")
    for path in paths:
        try:
            numbers.extend(_numbers(path))
        except OSError as error:
            if not skip:
                raise _explained(error, path) from None
            numbers.extend((-1, -1, -1, False))
    import numpy as np

    table = np.array(numbers, np.int64).reshape(-1, 4)
    return FileStats(table[:, 0].copy(), table[:, 1:3].copy(), table[:, 3].astype(bool))


def _numbers(path: str) -> tuple[int, int, int, bool]:
    """Return the size of a file, its two times, and whether it is a regular file; see `FileStats`."""
    item = listed(path)
    if item is not None:
        return item.size, item.changed, item.version(), True
    status = os.stat(path)
    is_regular = stat.S_ISREG(status.st_mode)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, is_regular


def concatenate_stats(parts: Sequence[FileStats]) -> FileStats:
    """Return the stats of all parts, in their order."""
    import numpy as np

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
    """Open a file for reading. An object is copied first.

    Raises:
        OSError: The file cannot be opened, or it is a pipe, which would block until it is written to.
        StorageError: It is in a bucket, which cannot be reached, or it was replaced there.
    """
    text = os.fspath(path)
    try:
        with copied(text) as local:
            file = open(local, "rb", opener=_open_at_once)  # noqa: SIM115 the caller closes it
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _explained(error, text) from None
    if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.ESPIPE, "it is a pipe, not a file", text)
    return file


def read_pieces(
    path: str, num_bytes: int, starts: Callable[[int], Sequence[int]]
) -> tuple[int, list[bytes]]:
    """Return the size of a file and pieces of it. Of a large object that was not copied only these are requested.

    Args:
        path: The file.
        num_bytes: Size of each piece, at most: the file may end before.
        starts: Returns where the pieces start, from the size of the file.

    Raises:
        OSError: The file cannot be read.
        StorageError: It is in a bucket, which cannot be reached, or it was replaced there.
    """
    mirror = mirror_of(path)
    item = None if mirror is None else mirror.objects.get(path)
    if mirror and item and item.size > _SMALL_BYTES and not mirror.has(path):
        return item.size, [mirror.read_part(path, start, num_bytes) for start in starts(item.size)]
    with open_file(path) as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        return size, [os.pread(descriptor, num_bytes, start) for start in starts(size)]


def _explained(error: OSError, path: str) -> OSError:
    """Return the error of a file that cannot be opened, which names a dangling link as such, and an object."""
    if isinstance(error, FileNotFoundError) and os.path.islink(path):
        return FileNotFoundError(error.errno, "The target of this link does not exist", path)
    if error.filename is not None:
        error.filename = path
    return error


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # or a pipe blocks until it is written to
