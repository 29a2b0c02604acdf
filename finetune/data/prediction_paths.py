"""Which images `--data.predict` means."""

import glob
import os
import tarfile
import zipfile
from collections.abc import Sequence

import numpy as np

from finetune.data.decode import IMAGE_SUFFIXES, stored_size
from finetune.data.samples import PathList, Samples
from finetune.data.targets import ClassIndex
from finetune.data.walk import Beside, find_pictures


def unlabelled(pictures: str | Sequence[str], skip: bool, is_told: bool) -> Samples:
    """Return the images that `files_to_predict` finds, of unknown classes."""
    paths = files_to_predict(pictures, skip, is_told)
    return Samples(paths, ClassIndex(np.full(len(paths), -1, np.int64), num_classes=0))


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
