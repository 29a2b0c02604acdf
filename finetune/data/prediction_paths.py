"""The images that `--data.predict` selects."""

import glob
import io
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from finetune.data.addresses import is_in_bucket
from finetune.data.faults import Fault, refuse_faults
from finetune.data.image_files import kind_of, open_file
from finetune.data.local_folders import local_folder
from finetune.data.samples import PathList, Samples
from finetune.data.tables.table_file import is_table
from finetune.data.tables.table_rows import listed_paths
from finetune.data.targets import ClassIndex
from finetune.data.walk import Skipped, find_images

log = logging.getLogger(__name__)


def unlabelled_samples(
    images: str | Sequence[str],
    skip: bool,
    is_logged: bool,
    columns: Mapping[str, Sequence[str]] | None = None,
) -> Samples:
    """Return the images that `files_to_predict` finds, without labels."""
    paths = files_to_predict(images, skip, is_logged, columns)
    return Samples(paths, ClassIndex(np.full(len(paths), -1, np.int64), num_classes=0))


def files_to_predict(
    images: str | Sequence[str],
    skip: bool = False,
    is_logged: bool = True,
    columns: Mapping[str, Sequence[str]] | None = None,
) -> PathList:
    """Return the images of a path: an image, a folder, an archive, a glob, a .txt file of paths, or a table.

    For several paths return the images of all, in their order.

    Args:
        images: Path or paths.
        skip: Skip unreadable folders and links that form a cycle. Otherwise they are an error.
        is_logged: Log other files of a folder that were skipped.
        columns: Column names of tables by role, for example those of a checkpoint; they need not exist.
    """
    if isinstance(images, str):
        return _expand(os.path.expanduser(images), skip, is_logged, columns or {})
    return PathList(
        path
        for pattern in images
        for path in _expand(os.path.expanduser(pattern), skip, is_logged, columns or {})
    )


def _expand(
    place: str, skip: bool, is_logged: bool, columns: Mapping[str, Sequence[str]]
) -> PathList:
    pattern = local_folder(place)
    kind = kind_of(pattern)
    if kind == "folder":
        skipped = Skipped()
        paths = PathList(find_images(pattern, skipped))
        refuse_faults(skipped.faults, skip)
        for note in (
            [*map(Fault.line, skipped.faults), *skipped.notes(pattern)] if is_logged else []
        ):
            log.warning("%s", note)
        missing = f"the folder {place!r} has no images; {skipped.supported()}"
    elif kind == "file" and pattern.lower().endswith(".txt"):
        with io.TextIOWrapper(
            open_file(pattern), encoding="utf-8-sig", errors="surrogateescape"
        ) as lines:
            listed = [line.rstrip("\r\n") for line in lines if line.strip()]
        if any(map(is_in_bucket, listed)):
            raise ValueError(f"the list {place!r} has addresses: pass the folder of the images")
        paths = PathList(listed)
        missing = f"the list {place!r} has no images"
    elif kind == "file" and is_table(pattern):
        if is_in_bucket(pattern):
            raise ValueError(f"the table {place!r} is not a local file: copy it to a local folder")
        paths = PathList(listed_paths(Path(pattern), columns))
        missing = f"the table {place!r} has no images"
    elif kind == "file":
        paths = PathList([pattern])
        missing = ""
    else:
        paths = PathList(
            path for path in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(path)
        )
        missing = f"there is no image, folder, list or glob {place!r}"
    if not len(paths):
        raise FileNotFoundError(missing)
    return paths
