"""Access to image files: stat and open.

This module reads local folders. Another kind of storage would be another module with the same functions.
"""

import hashlib
import os
import stat
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

_UNKNOWN = -1


@dataclass(frozen=True)
class FileStats:
    """The results of `os.stat` for N files.

    Attributes:
        sizes: Size of each file in bytes, (N,) int64; -1 if it does not exist.
        times: `st_mtime_ns` and `st_ctime_ns` of each file, (N, 2) int64; -1 if it does not exist.
        is_regular: Whether it is a regular file, not a folder or a pipe, (N,) bool.
    """

    sizes: np.ndarray
    times: np.ndarray
    is_regular: np.ndarray

    def take(self, rows: np.ndarray) -> "FileStats":
        """Return the stats of the files at `rows`, in that order."""
        return FileStats(self.sizes[rows], self.times[rows], self.is_regular[rows])


def file_stats(paths: Sequence[str], skip: bool = True) -> FileStats:
    """Call `os.stat` for each file.

    Args:
        paths: The files, N.
        skip: Store -1 for a file that does not exist, which is reported when it is read. Otherwise raise.

    Raises:
        OSError: A file does not exist, and `skip` is false.
    """
    sizes = array("q")
    times = array("q")
    is_regular = array("b")
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            if not skip:
                raise
            sizes.append(_UNKNOWN)
            times.extend((_UNKNOWN, _UNKNOWN))
            is_regular.append(False)
            continue
        sizes.append(status.st_size)
        times.extend((status.st_mtime_ns, status.st_ctime_ns))
        is_regular.append(stat.S_ISREG(status.st_mode))
    return FileStats(
        np.array(sizes, np.int64),
        np.array(times, np.int64).reshape(-1, 2),
        np.array(is_regular, bool),
    )


def concatenate_stats(parts: Sequence[FileStats]) -> FileStats:
    """Return the stats of all parts, in their order."""
    return FileStats(
        np.concatenate([part.sizes for part in parts]),
        np.concatenate([part.times for part in parts]),
        np.concatenate([part.is_regular for part in parts]),
    )


def files_digest(paths: Sequence[str], stats: FileStats, root: str | Path) -> str:
    """Return a hash of the relative path, size and change times of every file, in this order.

    Programs can set `st_mtime`, and copying may preserve it. The file system sets `st_ctime` at every change of
    content, name or permissions, and not when a file is read. So a replaced file is noticed even if size and `st_mtime`
    are the same. Exceptions are file systems without `st_ctime` (FAT, some network mounts) and a clock that was set
    back. The inode (`st_ino`) would not detect more, and some mounts assign new inodes each time.
    """
    digest, prefix = hashlib.sha256(), os.path.join(Path(root), "")
    for path, size, (changed, renamed) in zip(
        paths, stats.sizes.tolist(), stats.times.tolist(), strict=True
    ):
        row = f"{path.removeprefix(prefix)}\0{size}\0{changed}\0{renamed}\n"
        digest.update(row.encode(errors="surrogateescape"))
    return digest.hexdigest()


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading. A pipe is refused, because reading it would block until it is written to."""
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 the caller closes it
    if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError("it is a pipe, not a file")
    return file


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
