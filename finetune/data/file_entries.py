"""What a disk and a bucket answer about files: entries of folders, sizes and times."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

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

    sizes: np.ndarray
    times: np.ndarray
    is_regular: np.ndarray

    def take(self, rows: np.ndarray) -> "FileStats":
        """Return the stats of the files at `rows`, in that order."""
        return FileStats(self.sizes[rows], self.times[rows], self.is_regular[rows])
