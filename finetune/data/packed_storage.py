"""Reads the images of a packed folder from its tar files. Each image has the path that it had before.

The index is trusted no more than any other file: it can name shards of its own folder only, and the bytes of each image
are compared with their digest when it is read.
"""

import errno
import io
import json
import os
import posixpath
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, BinaryIO

import numpy as np

from finetune.data.addresses import StorageError
from finetune.data.limits import MAX_BYTES
from finetune.data.pack_place import INDEX, has_label, shard_name
from finetune.data.samples import PathList
from finetune.data.storage import (
    Entry,
    FileStats,
    Kind,
    Place,
    Starts,
    Storage,
    block_number,
    is_local,
    storage_of,
)
from finetune.system.messages import WrongUsage, shown

TAR_BLOCK = 512  # bytes; a file in a tar begins and ends at a multiple of it
TAR_RECORD = 20 * TAR_BLOCK  # the size of a tar is a multiple of it
_NEAR = 32  # rows after that of the last path, among which the next one is looked for first
_LARGEST_PLACE = 2**50  # bytes; larger numbers are no places in a file
_DIGEST = re.compile("[0-9a-f]{16}")
_SHARD = re.compile(r"shard-(\d{5,9})\.tar")


def content_digest(content: bytes) -> int:
    """Return a 64-bit digest of the bytes of an image."""
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "big")


def padded_size(num_bytes: int, block: int = TAR_BLOCK) -> int:
    """Return the size of some bytes in a tar: rounded up to complete blocks."""
    return -(-num_bytes // block) * block


@dataclass(frozen=True)
class PackIndex:
    """Where the N images of a packed folder are, sorted by path. It takes 36 bytes for each image, and its path.

    Attributes:
        paths: Path of each image in the folder.
        shards: Number of the shard of each image, (N,) int32.
        offsets: Where the bytes of each image begin in the shard, (N,) int64.
        sizes: Number of bytes of each image, (N,) int64.
        digests: The `content_digest` of each image, (N,) uint64.
        has_labels: Whether the rows have labels, as those of a packed table do.
    """

    paths: PathList
    shards: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    digests: np.ndarray
    has_labels: bool


def read_index(file: BinaryIO, place: str) -> PackIndex:
    """Read an index line by line.

    Args:
        file: The file.
        place: Its path, for messages.

    Raises:
        StorageError: A line is invalid. The message has its number.
    """
    shards = array("i")
    offsets = array("q")
    sizes = array("q")
    digests = array("Q")
    has_labels = False

    def paths() -> Iterator[str]:
        nonlocal has_labels
        previous = ""
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                _check_row(row, previous)
            except (ValueError, RecursionError) as error:
                if number == 1 and line.lstrip()[:1] == b"<":
                    raise StorageError(
                        f"{place} is a web page, not the index of packed images: check the address of the folder"
                    ) from None
                reason = "it is not JSON" if isinstance(error, json.JSONDecodeError) else error
                raise StorageError(
                    f"{place}, line {number}: {reason}: copy the folder again, or pack the images again"
                ) from None
            has_labels = has_labels or has_label(row)
            shards.append(int(_SHARD.fullmatch(row["shard"])[1]))  # type: ignore[index]
            offsets.append(row["offset"])
            sizes.append(row["size"])
            digests.append(int(row["digest"], 16))
            previous = row["path"]
            yield previous

    listed = PathList(paths())
    if not len(listed):
        raise StorageError(f"{place} is empty: copy the folder again, or pack the images again")
    return PackIndex(
        paths=listed,
        shards=np.frombuffer(shards, np.int32),
        offsets=np.frombuffer(offsets, np.int64),
        sizes=np.frombuffer(sizes, np.int64),
        digests=np.frombuffer(digests, np.uint64),
        has_labels=has_labels,
    )


def _check_row(row: Any, previous: str) -> None:
    """Check a row of an index.

    Args:
        row: The row.
        previous: Path of the row before it; "" for the first row.

    Raises:
        ValueError: It is invalid.
    """
    if not isinstance(row, dict):
        raise ValueError("it is not an object")
    path = row.get("path")
    if not isinstance(path, str) or not _is_inside(path):
        raise ValueError(f"the path {shown(str(path))!r} is not one in the folder")
    if path <= previous:
        raise ValueError("the paths are not sorted")
    shard = row.get("shard")
    if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
        raise ValueError(f"{shown(str(shard))!r} is not a shard in the folder")
    for name, largest in (("offset", _LARGEST_PLACE), ("size", MAX_BYTES)):
        value = row.get(name)
        if type(value) is not int or not 0 <= value <= largest:
            raise ValueError(f"the {name} {shown(str(value))} is not from 0 to {largest:,}")
    digest = row.get("digest")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError("the digest is not 16 hexadecimal digits")


def _is_inside(path: str) -> bool:
    """Return whether a path is relative, without redundant parts, and does not leave its folder."""
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return b"\0" not in encoded and not {"", ".", ".."}.intersection(path.split("/"))


class PackedStorage:
    """The images of a packed folder.

    Args:
        folder: The folder. The paths of its images begin with it.
        backing: The storage of the index and of the shards.

    Raises:
        OSError: The index cannot be read.
        StorageError: The index is invalid, or a shard is missing or truncated.
    """

    def __init__(self, folder: str, backing: Storage) -> None:
        self.folder = folder
        self._backing = backing
        self._next = 0  # the row after that of the last path
        self._read()

    def _read(self) -> None:
        place = f"{self.folder}/{INDEX}"
        self._index_stats = self._backing.stats([place], skip=False)
        with self._backing.open_file(place) as file:
            self.index = read_index(file, place)
        self._check_shards()

    def _check_shards(self) -> None:
        """Check that all shards are complete, and that none is a link, which could lead to any file."""
        index = self.index
        numbers, of_image = np.unique(index.shards, return_inverse=True)
        ends = np.zeros(len(numbers), np.int64)
        np.maximum.at(ends, of_image, index.offsets + index.sizes)
        paths = [self._shard(number) for number in numbers.tolist()]
        links = {entry.path for entry in self._backing.entries(self.folder) if entry.is_link}
        sizes = self._backing.stats(paths, skip=True).sizes.tolist()
        for i, (path, size, end) in enumerate(zip(paths, sizes, ends.tolist(), strict=True)):
            expected = padded_size(padded_size(end) + 2 * TAR_BLOCK, TAR_RECORD)
            if size == expected and path not in links:
                continue
            if path in links:
                reason = "it is a link"
            elif size < 0:
                reason = "it is missing"
            else:
                reason = f"it has {size:,} bytes instead of {expected:,}"
            first = self.index.paths[int(np.flatnonzero(of_image == i)[0])]
            raise StorageError(
                f"{path}, which holds {shown(first)}: {reason}: copy the file again, or pack the images again"
            )

    def _shard(self, number: int) -> str:
        return f"{self.folder}/{shard_name(number)}"

    def refresh(self, folder: str) -> None:
        self._backing.refresh(self.folder)
        index_stats = self._backing.stats([f"{self.folder}/{INDEX}"], skip=False)
        if np.array_equal(index_stats.times, self._index_stats.times):
            self._check_shards()
        else:
            self._read()

    def normal(self, path: str) -> str:
        return self._backing.normal(path)

    def absolute(self, path: str) -> str:
        return self._backing.absolute(path)

    def resolved(self, path: str) -> str:
        return self._backing.resolved(path)

    def _inside(self, path: str) -> str:
        """Return a path relative to the folder, "" for the folder itself."""
        inside = posixpath.normpath(path[len(self.folder) :].strip("/"))
        return "" if inside == "." else inside

    def _row(self, path: str) -> int | None:
        """Return the row of an image, or None. Paths are mostly looked up in order, so the next row is tried first."""
        inside = path[len(self.folder) + 1 :]
        paths = self.index.paths
        row = self._next
        if row >= len(paths) or paths[row] != inside:
            # the images of a split are not far apart
            last = min(row + _NEAR, len(paths))
            row = bisect_left(paths, inside, row, last)
            if row == last or paths[row] != inside:
                row = bisect_left(paths, inside)
            if row == len(paths) or paths[row] != inside:
                return None
        self._next = row + 1
        return row

    def _existing_row(self, path: str) -> int:
        row = self._row(path)
        if row is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return row

    def kind(self, path: str) -> Kind:
        inside = self._inside(path)
        paths = self.index.paths
        row = bisect_left(paths, inside)
        if row < len(paths) and paths[row] == inside:
            return "file"
        return "folder" if self._first_row(inside) is not None else None

    def _first_row(self, inside: str) -> int | None:
        """Return the row of the first image in a folder or its subfolders; None if there is no such folder."""
        prefix = posixpath.join(inside, "")
        row = bisect_left(self.index.paths, prefix)
        is_there = row < len(self.index.paths) and self.index.paths[row].startswith(prefix)
        return row if is_there else None

    def entries(self, folder: str) -> Iterator[Entry]:
        inside = self._inside(folder)
        row = self._first_row(inside)
        if row is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
        paths = self.index.paths
        prefix = posixpath.join(inside, "")
        while row < len(paths) and (path := paths[row]).startswith(prefix):
            name, slash, _ = path[len(prefix) :].partition("/")
            yield Entry(name, f"{self.folder}/{prefix}{name}", bool(slash), is_link=False)
            # "0" follows "/": after all paths in this subfolder
            row = bisect_left(paths, f"{prefix}{name}0") if slash else row + 1

    def stats(self, paths: Sequence[str], skip: bool) -> FileStats:
        rows_or_none = [self._row(path) if skip else self._existing_row(path) for path in paths]
        rows = np.array([-1 if row is None else row for row in rows_or_none], np.int64)
        is_there = rows >= 0
        # the digest identifies the content, so it replaces the times
        times = np.where(is_there, self.index.digests[rows].view(np.int64), -1)
        return FileStats(
            np.where(is_there, self.index.sizes[rows], -1),
            np.stack([times, np.where(is_there, 0, -1)], axis=1),
            is_there,
        )

    def open_file(self, path: str) -> BinaryIO:
        return io.BytesIO(self.contents([path])[0])

    def place(self, path: str) -> Place | None:
        row = self._row(path)
        if row is None:
            return None
        begin = int(self.index.offsets[row])
        shard = self._shard(int(self.index.shards[row]))
        return Place(shard, begin, begin + int(self.index.sizes[row]))

    def blocks(self, paths: Sequence[str]) -> np.ndarray:
        rows = np.fromiter((self._existing_row(path) for path in paths), np.int64, len(paths))
        first = self.index.shards[rows].astype(np.int64) * (block_number(_LARGEST_PLACE) + 1)
        return first + block_number(self.index.offsets[rows])

    def contents(self, paths: Sequence[str]) -> list[bytes]:
        rows = [self._existing_row(path) for path in paths]
        begin = int(self.index.offsets[rows[0]])
        ends = self.index.offsets[rows] + self.index.sizes[rows]
        piece = self._pieces(paths[0], rows[0], int(ends.max()) - begin, [0])[0]
        contents = []
        for path, row, end in zip(paths, rows, ends.tolist(), strict=True):
            content = piece[int(self.index.offsets[row]) - begin : end - begin]
            if content_digest(content) != int(self.index.digests[row]):
                raise StorageError(
                    f"{path}: its bytes in {self._shard(int(self.index.shards[row]))} are not those that were packed: "
                    "copy the file again, or pack the images again"
                )
            contents.append(content)
        return contents

    def _pieces(self, path: str, row: int, num_bytes: int, starts: Sequence[int]) -> list[bytes]:
        shard = self._shard(int(self.index.shards[row]))
        places = [int(self.index.offsets[row]) + start for start in starts]
        try:
            return self._backing.read_pieces(shard, num_bytes, lambda _: places)[1]
        except OSError as error:  # not the fault of this image, so it is not skipped
            raise StorageError(f"{path}: cannot read {shard}: {error.strerror or error}") from error

    def read_pieces(self, path: str, num_bytes: int, starts: Starts) -> tuple[int, list[bytes]]:
        row = self._existing_row(path)
        size = int(self.index.sizes[row])
        begins = [min(start, size) for start in starts(size)]
        pieces = self._pieces(path, row, num_bytes, begins)
        return size, [piece[: size - begin] for begin, piece in zip(begins, pieces, strict=True)]

    def results(self, path: str) -> dict[str, Any] | None:
        return self._backing.results(f"{self.folder}/{INDEX}")

    def commit(self, path: str) -> str:
        return self._backing.commit(f"{self.folder}/{INDEX}")


def check_has_class_folders(folder: str) -> None:
    """Refuse a packed folder of the images of a table, whose folders are not their classes.

    Raises:
        WrongUsage: It is one.
    """
    storage = storage_of(folder)
    if not isinstance(storage, PackedStorage) or not storage.index.has_labels:
        return
    table = f"{storage.folder}/{INDEX}"
    hint = f"pass its table {table}"
    if not is_local(folder):
        hint = f"copy its table {table}, and pass the copy with --data.root {storage.folder}"
    raise WrongUsage(f"{folder} has the packed images of a table: {hint}")
