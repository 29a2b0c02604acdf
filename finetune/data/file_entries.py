"""What a storage of images answers about its files: stats, entries of folders, pieces of files."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

import numpy as np

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
