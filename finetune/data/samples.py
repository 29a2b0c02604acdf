"""The images of one split as a table."""

import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import overload

import numpy as np

from finetune.data.addresses import is_in_bucket
from finetune.data.decode import decode
from finetune.data.file_facts import FileFacts, look_at
from finetune.data.image_files import FileStats, file_stats
from finetune.data.memmap import MemmapImages
from finetune.data.splits import hashes
from finetune.data.targets import Targets

_BLOCK = 4096  # paths that are decoded at a time


class PathList(Sequence[str]):
    """Many paths in two arrays. A path takes its bytes plus 8, and forked workers share the memory without copies.

    Attributes:
        letters: The bytes of all paths, one after the other, (L,) uint8.
        ends: The place of each path's end in `letters`, after a 0 for the first begin, (N + 1,) int64.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        letters = bytearray()
        ends = array("q", [0])
        for path in paths:
            letters += os.fsencode(path)
            ends.append(len(letters))
        self.letters = np.frombuffer(bytes(letters), np.uint8)
        self.ends = np.frombuffer(ends.tobytes(), np.int64)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __iter__(self) -> Iterator[str]:
        # in blocks of plain text: several times quicker than by index
        for first in range(0, len(self), _BLOCK):
            ends = self.ends[first : first + _BLOCK + 1]
            letters = self.letters[ends[0] : ends[-1]].tobytes()
            places = pairwise((ends - ends[0]).tolist())
            if letters.isascii():
                text = letters.decode("ascii")
                yield from (text[start:end] for start, end in places)
            else:
                yield from (os.fsdecode(letters[start:end]) for start, end in places)

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        if not 0 <= i < len(self):
            raise IndexError(i)
        return os.fsdecode(self.letters[self.ends[i] : self.ends[i + 1]].tobytes())

    def take(self, rows: np.ndarray) -> "PathList":
        """Return the paths at `rows`, in that order."""
        sizes = np.diff(self.ends)[rows]
        ends = np.concatenate([[0], np.cumsum(sizes)])
        letters = np.empty(ends[-1], np.uint8)
        for first in range(0, len(rows), _BLOCK):  # since the places of letters take 8 bytes each
            block = slice(first, first + _BLOCK)
            shifts = self.ends[rows[block]] - ends[first : first + len(sizes[block])]
            into = slice(ends[first], ends[first + len(sizes[block])])
            places = np.arange(into.start, into.stop) + np.repeat(shifts, sizes[block])
            letters[into] = self.letters[places]
        return PathList._of(letters, ends)

    @staticmethod
    def joined(parts: Sequence["PathList"]) -> "PathList":
        """Return the paths of all parts, in their order."""
        sizes = np.concatenate([[0], *(np.diff(part.ends) for part in parts)])
        letters = np.concatenate([np.zeros(0, np.uint8), *(part.letters for part in parts)])
        return PathList._of(letters, np.cumsum(sizes))

    @staticmethod
    def _of(letters: np.ndarray, ends: np.ndarray) -> "PathList":
        paths = PathList(())
        paths.letters = letters
        paths.ends = ends.astype(np.int64)
        return paths


@dataclass(frozen=True)
class CachedImages:
    """The decoded images of a split in a cache.

    Attributes:
        images: The images of the cache; None where one could not be decoded.
        rows: Index in the cache of each image of the split, (N,).
    """

    images: MemmapImages
    rows: np.ndarray

    def __getitem__(self, index: int) -> np.ndarray | None:
        return self.images[self.rows[index]]

    def take(self, rows: np.ndarray) -> "CachedImages":
        """Return the images at `rows`, in that order."""
        return CachedImages(self.images, self.rows[rows])


@dataclass(frozen=True)
class Samples:
    """The images of one split, N.

    Attributes:
        paths: Path of each image.
        targets: Target of each image.
        folder: Folder of the data set; "" if there is none. The name of an image is its path below it. An image of a
            table may lie elsewhere, and then has its path for a name.
        shorter_side: Shorter side, in pixels, to which larger images are resized in decoding; None does not resize.
        cached: The decoded images, if a cache has them.
        stats: Size and times of each file, if they were read when the images were listed.
        facts: What each file holds, if that was read.
        groups: Group of each image as `splits.group_ids` of its name, (N,) uint64; None if there are no groups. The
            images of one group belong to one split.
        group_names: The name of each group by its id; also of groups of other splits.
        weights: Weight of each image in training, (N,) float64; None if all have the same.
        is_drawn: Whether the images were held out of training at random, and are not a split of the user.
    """

    paths: PathList
    targets: Targets
    folder: str = ""
    shorter_side: int | None = None
    cached: CachedImages | None = None
    stats: FileStats | None = None
    facts: FileFacts | None = None
    groups: np.ndarray | None = None
    group_names: Mapping[int, str] = field(default_factory=dict)
    weights: np.ndarray | None = None
    is_drawn: bool = False

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, rows: np.ndarray) -> "Samples":
        """Return the images at `rows`, in that order."""
        return replace(
            self,
            paths=self.paths.take(rows),
            targets=self.targets.take(rows),
            cached=None if self.cached is None else self.cached.take(rows),
            stats=None if self.stats is None else self.stats.take(rows),
            facts=None if self.facts is None else self.facts.take(rows),
            groups=None if self.groups is None else self.groups[rows],
            weights=None if self.weights is None else self.weights[rows],
        )

    def names(self) -> Iterator[str]:
        """Yield the name of each image; see `folder`."""
        prefix = os.path.join(self.folder, "")
        return (path.removeprefix(prefix) for path in self.paths)

    def group_name(self, index: int) -> str:
        """Return the name of the group of image `index`; "" if there are no groups."""
        return "" if self.groups is None else self.group_names[int(self.groups[index])]

    def load_stats(self) -> FileStats:
        """Return the size and times of each file. Files are only read from disk if `stats` is None."""
        return file_stats(self.paths) if self.stats is None else self.stats

    def look(self) -> FileFacts:
        """Return what each file holds. Files are only read if `facts` is None."""
        return look_at(self.paths) if self.facts is None else self.facts

    def hashes(self) -> np.ndarray:
        """Return the hash of each image's name, (N,) uint64."""
        return hashes(self.names())

    def read(self, index: int) -> np.ndarray:
        """Return image `index`, (H, W, 3) uint8 RGB.

        An image that could not be decoded for the cache is decoded again, to raise its error.

        Raises:
            DecodeError: The image cannot be decoded.
        """
        image = None if self.cached is None else self.cached[index]
        if image is not None:
            return image
        return decode(self.paths[index], shorter_side=self.shorter_side)

    def files_to_read(self, indices: Iterable[int]) -> list[str]:
        """Return the files of images that are not in the cache."""
        return [
            self.paths[index]
            for index in indices
            if self.cached is None or self.cached[index] is None
        ]

    def has_remote_files(self) -> bool:
        """Return whether files are in a bucket, and are copied before workers read them."""
        # a list of images to predict may have paths of any place
        paths = [self.folder] if self.folder else self.paths
        return any(map(is_in_bucket, paths))
