"""The images that `--data.predict` selects."""

import glob
import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from finetune.data.addresses import is_in_bucket
from finetune.data.data_set import DataSet
from finetune.data.drawn_splits import check_has_groups, put_into_groups, with_groups
from finetune.data.faults import Fault, refuse_faults
from finetune.data.image_files import kind_of, open_file
from finetune.data.local_folders import local_folder
from finetune.data.samples import PathList, Samples
from finetune.data.tables.table_file import is_table
from finetune.data.tables.table_rows import listed_images
from finetune.data.targets import ClassIndex
from finetune.data.walk import Skipped, find_images

log = logging.getLogger(__name__)


class _Found(NamedTuple):
    """The images of a place, the folder that their names are relative to, and the group of each if it has groups."""

    paths: PathList
    folder: str = ""
    groups: Sequence[str] | None = None


def unlabelled_data(
    images: str | Sequence[str],
    class_names: list[str],
    skip: bool,
    is_logged: bool,
    columns: Mapping[str, Sequence[str]],
    group_by: str | None,
) -> DataSet:
    """Return the images that `files_to_predict` finds, without labels, as the split `predict`.

    Their groups are those of tables, in which an image of another place is a group of its own, or are made from the
    paths as `drawn_splits.put_into_groups` does: below the folder if there is a single one.

    Raises:
        WrongUsage: `group_by` finds no group, or there is also a table with groups.
    """
    found = list(_places(images, skip, is_logged, columns))
    paths = PathList.joined([one.paths for one in found])
    folder = found[0].folder if len(found) == 1 else ""
    unknown = ClassIndex(np.full(len(paths), -1, np.int64), num_classes=0)
    data = DataSet(class_names, {"predict": Samples(paths, unknown, folder)})
    if any(one.groups is not None for one in found):
        names = [name for one in found for name in one.groups or one.paths]
        data = with_groups(data, {"predict": names})
    data = put_into_groups(data, group_by)
    check_has_groups(data, group_by)
    return data


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

    Raises:
        FileNotFoundError: A path has no images.
        ValueError: A folder has faults, or a table has no column of paths.
    """
    found = _places(images, skip, is_logged, columns or {})
    return PathList.joined([one.paths for one in found])


def _places(
    images: str | Sequence[str],
    skip: bool,
    is_logged: bool,
    columns: Mapping[str, Sequence[str]],
) -> Iterator[_Found]:
    """Yield the images of each path; see `files_to_predict`."""
    places = [images] if isinstance(images, str) else images
    for place in map(os.path.expanduser, places):
        path = local_folder(place)
        kind = kind_of(path)
        folder = ""
        groups = None
        if kind == "folder":
            paths = _images_in(path, place, skip, is_logged)
            folder = path
        elif kind == "file" and path.lower().endswith(".txt"):
            paths = _paths_in_list(path)
        elif kind == "file" and is_table(path):
            if is_in_bucket(path):
                raise ValueError(
                    f"the table {place!r} is not a local file: copy it to a local folder"
                )
            listed, groups = listed_images(Path(path), columns)
            paths = PathList(listed)
        elif kind == "file":
            paths = PathList([path])
        else:
            paths = PathList(filter(os.path.isfile, sorted(glob.glob(path, recursive=True))))
        if not len(paths):
            what = "it has no images" if kind else "there is no image, folder, list or glob"
            raise FileNotFoundError(f"{place!r}: {what}")
        yield _Found(paths, folder, groups)


def _images_in(folder: str, place: str, skip: bool, is_logged: bool) -> PathList:
    """Return the images in a folder. What is skipped is logged."""
    skipped = Skipped()
    paths = PathList(find_images(folder, skipped))
    refuse_faults(skipped.faults, skip)
    if not len(paths):
        raise FileNotFoundError(f"the folder {place!r} has no images; {skipped.supported()}")
    if is_logged:
        for note in [*map(Fault.line, skipped.faults), *skipped.notes(folder)]:
            log.warning("%s", note)
    return paths


def _paths_in_list(path: str) -> PathList:
    with io.TextIOWrapper(open_file(path), "utf-8-sig", "surrogateescape") as lines:
        listed = [line.rstrip("\r\n") for line in lines if line.strip()]
    if any(map(is_in_bucket, listed)):
        raise ValueError(f"the list {path!r} has addresses: pass the folder of the images")
    return PathList(listed)
