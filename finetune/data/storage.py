"""The files of images where they lie: what is known of one without reading it, and how it is opened.

All of it is of local folders. What reads files elsewhere would be another module with these functions.
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
    """What the file system knows of N files without reading them.

    Attributes:
        sizes: Bytes of each, (N,) int64; -1 if it cannot be found.
        times: When its content and when anything of it was last changed, in nanoseconds, (N, 2) int64; -1 likewise.
        is_regular: Whether it is a file, not a folder or a pipe, (N,) bool.
    """

    sizes: np.ndarray
    times: np.ndarray
    is_regular: np.ndarray

    def take(self, rows: np.ndarray) -> "FileStats":
        """Return what is known of the files at `rows`, in that order."""
        return FileStats(self.sizes[rows], self.times[rows], self.is_regular[rows])


def file_stats(paths: Sequence[str], skip: bool = True) -> FileStats:
    """Ask the file system for each file.

    Args:
        paths: The files, N.
        skip: Note a file that cannot be found, which reading it will report; else it is an error.

    Raises:
        OSError: A file cannot be found.
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


def concatenated(parts: Sequence[FileStats]) -> FileStats:
    """Return what is known of the files of all parts, in their order."""
    return FileStats(
        np.concatenate([part.sizes for part in parts]),
        np.concatenate([part.times for part in parts]),
        np.concatenate([part.is_regular for part in parts]),
    )


def files_digest(paths: Sequence[str], stats: FileStats, root: str | Path) -> str:
    """Return a hash of the relative path, size and times of change of every file, in this order.

    Of the two times programs can set one (`st_mtime`, which copying may keep); the file system sets the other
    (`st_ctime`) at every change of content, name or rights, and never when a file is read. So a file put in the place
    of another is noticed, also where size and time are the same, unless the file system keeps no such time (FAT, some
    network mounts) or its clock was set back. The number of a file (`st_ino`) would see no more, and some mounts give
    new ones each time.
    """
    digest, prefix = hashlib.sha256(), os.path.join(Path(root), "")
    for path, size, (changed, renamed) in zip(
        paths, stats.sizes.tolist(), stats.times.tolist(), strict=True
    ):
        row = f"{path.removeprefix(prefix)}\0{size}\0{changed}\0{renamed}\n"
        digest.update(row.encode(errors="surrogateescape"))
    return digest.hexdigest()


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading; a pipe is refused, since that would wait for whoever writes to it."""
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 the caller closes it
    if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError("it is a pipe, not a file")
    return file


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
