"""How picture i of a list of files is read; and which pictures `--data.predict` means."""

import glob
import os
import tarfile
import zipfile
from array import array
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np

from finetune.data.decode import IMAGE_SUFFIXES, decode, stored_size
from finetune.data.walk import Beside, find_pictures


class PathList(Sequence[str]):
    """Many paths in two arrays: 8 bytes a path more than its letters, and nothing that forked workers would copy."""

    def __init__(self, paths: Iterable[str]) -> None:
        letters, ends = bytearray(), array("q", [0])
        for path in paths:
            letters += os.fsencode(path)
            ends.append(len(letters))
        self._letters = np.frombuffer(bytes(letters), np.uint8)
        self._ends = np.frombuffer(ends.tobytes(), np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        if not 0 <= i < len(self):
            raise IndexError(i)
        return os.fsdecode(self._letters[self._ends[i] : self._ends[i + 1]].tobytes())


class FileReader:
    """Reads picture i of a list of files, made smaller if its shorter side is longer than `shorter_side` pixels."""

    def __init__(self, paths: PathList, shorter_side: int | None = None) -> None:
        self.paths, self.shorter_side = paths, shorter_side

    def __call__(self, index: int) -> np.ndarray:
        return decode(self.paths[index], shorter_side=self.shorter_side)


def files_to_predict(
    pictures: str | Sequence[str], skip: bool = False, is_told: bool = True
) -> PathList:
    """Return the pictures that a path means: one picture, a folder, a glob, or a .txt file with a path on each line.

    Of several such paths, all that they mean, in their order.

    Args:
        pictures: Path or paths.
        skip: Leave out folders that can't be read, and links that lead back; else they are an error.
        is_told: Say what else of a folder was left out.
    """
    if isinstance(pictures, str):
        return _files(os.path.expanduser(pictures), skip, is_told)
    return PathList(
        path for pattern in pictures for path in _files(os.path.expanduser(pattern), skip, is_told)
    )


def _files(pattern: str, skip: bool, is_told: bool) -> PathList:
    if os.path.isdir(pattern):
        beside = Beside(skip)
        paths = PathList(find_pictures(pattern, beside))
        if is_told:
            beside.tell(pattern)
        missing = f"the folder {pattern!r} holds no pictures ({' '.join(sorted(IMAGE_SUFFIXES))})"
    elif os.path.isfile(pattern) and pattern.lower().endswith(".txt"):
        with open(pattern, encoding="utf-8-sig", errors="surrogateescape") as lines:
            paths = PathList(line.rstrip("\r\n") for line in lines if line.strip())
        missing = f"the list {pattern!r} names no pictures"
    elif os.path.isfile(pattern):
        _check_not_many(pattern)
        paths, missing = PathList([pattern]), ""
    else:
        paths = PathList(
            path for path in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(path)
        )
        missing = f"no picture, folder, list or glob {pattern!r} here"
    if not len(paths):
        raise FileNotFoundError(missing)
    return paths


def _check_not_many(path: str) -> None:
    """Refuse a file that stands for many pictures; another one that is none is told of in its row."""
    if path.lower().endswith((".csv", ".tsv", ".json", ".jsonl", ".parquet", ".xlsx")):
        raise ValueError(
            f"{path!r} is a table: a list of pictures is a .txt file with a path on each line"
        )
    if not any(stored_size(path)) and (zipfile.is_zipfile(path) or tarfile.is_tarfile(path)):
        raise ValueError(f"{path!r} is an archive: unpack it, and give the folder")
