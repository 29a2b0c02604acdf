"""The rows of a table: the path, split, group and weight of each image, and what is wrong with them."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.addresses import shown_address
from finetune.data.faults import Fault
from finetune.data.image_files import FileStats, kind_of
from finetune.data.listing import SPLITS
from finetune.data.mirror import original
from finetune.data.splits import group_ids
from finetune.data.tables.table_columns import find_columns, split_of_values
from finetune.data.tables.table_file import TableFile, read_table
from finetune.data.tables.table_labels import label_text
from finetune.data.walk import is_image_file
from finetune.system.file_names import composed
from finetune.system.messages import shown, why_name_is_invalid

_NUM_TRIED = 20  # files that are looked for to find the folder of relative paths
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# Only the ratios of weights matter. In this range their products and sums are exact enough in float32.
_MIN_WEIGHT = 1e-9
_MAX_WEIGHT = 1e9


def folder_of(table: TableFile, column: str) -> str:
    """Return the folder that relative paths in a table are relative to: that of the table, or the working directory.

    It is the working directory if the first files are there, and none is in the folder of the table. An example is the
    predictions.csv of a run.
    """
    folder = str(table.path.parent)
    values = table.columns[column][:_NUM_TRIED]
    texts = [value.strip() for value in values if isinstance(value, str)]
    first = [text for text in texts if text and _is_path(text) and not _URL.match(text)]
    if any(_exists(os.path.join(folder, text)) for text in first):
        return folder
    return "." if any(map(_exists, first)) else folder


def _exists(path: str) -> bool:
    return kind_of(path) not in (None, "link")


def _is_path(text: str) -> bool:
    """Return whether a file may have this name: without zero bytes, and in the encoding of file names."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def read_paths(table: TableFile, column: str, root: str) -> tuple[list[str], list[Fault]]:
    """Return the path of each image, and the rows that have none. Relative paths are joined to `root`.

    An address must be inside of that of `root`, so that an untrusted table cannot name another server.
    """
    address = f"{original(root)}/"
    prefix = "" if root == "." else os.path.join(root, "")
    paths: list[str] = []
    faults: list[Fault] = []
    for row, value in enumerate(table.columns[column]):
        text = value.strip() if isinstance(value, str) else label_text(value)
        has_scheme = "://" in text and _URL.match(text) is not None
        if has_scheme and text.startswith(address):
            has_scheme = False
            text = text.removeprefix(address)
        fault = ""
        if not text:
            fault = "the path is empty"
        elif has_scheme:
            fault = (
                f"{shown_address(text)!r} is an address outside of the folder of the images; write paths that are "
                "relative to their folder, and pass that as --data.root, or to predict in place of the table"
            )
        elif not _is_path(text):
            fault = f"'{shown(text)}' is not a path"
        if fault:
            faults.append(table.fault(row, column, fault))
            paths.append(prefix)
            continue
        path = text if text[:1] == "/" else prefix + text
        is_plain = "./" not in path and "//" not in path and not path.endswith("/..")
        # two rows of one image have the same path
        paths.append(path if is_plain else os.path.normpath(path))
    return paths, faults


def listed_paths(path: Path, named: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the paths in a table whose other columns do not matter.

    Args:
        path: The table.
        named: Column names by role. The column of the path is found by its usual names if it has no such name here.

    Raises:
        ValueError: The table has no column of paths, or a row without a path.
    """
    table = read_table(path)
    names = named.get("path", ())
    own = {"path": names} if set(names) & set(table.columns) else {}
    columns = find_columns(table, own, needs_labels=False)
    paths, faults = read_paths(table, columns.path, folder_of(table, columns.path))
    if faults:
        raise ValueError(faults[0].advice())
    return paths


def read_splits(table: TableFile, column: str) -> tuple[np.ndarray, list[Fault]]:
    """Return the index into `SPLITS` of each row, (N,), and the rows whose split is faulty."""
    split_of = split_of_values(column)

    def parse(value: Any) -> int:
        text = label_text(value)
        if text.lower() not in split_of:
            raise ValueError(f"'{shown(text)}' is not a split" if text else "the split is empty")
        return SPLITS.index(split_of[text.lower()])

    hint = "use train, val or test, or ignore the column with --data.columns split:null"
    numbers, index, faults = table.read_column(column, parse, hint)
    return np.array([number or 0 for number in numbers])[index], faults


def read_groups(table: TableFile, column: str) -> tuple[np.ndarray, list[Fault]]:
    """Return the group of each row as in `Samples`, (N,) uint64, and the rows whose group is faulty."""

    def parse(value: Any) -> str:
        text = label_text(value)
        if why := why_name_is_invalid(text) if text else "is empty":
            raise ValueError(f"the group {why}")
        return text

    names, index, faults = table.read_column(column, parse)
    return group_ids(name or "" for name in names)[index], faults


def read_weights(table: TableFile, column: str) -> tuple[np.ndarray, list[Fault]]:
    """Return the weight of each row, (N,) float64, and the rows whose weight is faulty."""

    def parse(value: Any) -> float:
        text = label_text(value)
        if not text:
            raise ValueError("the weight is empty")
        try:
            weight = float(text)
        except ValueError:
            weight = -1.0
        if weight != 0 and not _MIN_WEIGHT <= weight <= _MAX_WEIGHT:
            raise ValueError(f"'{shown(text)}' is not a weight")
        return weight

    usual = f"0 or a number from {_MIN_WEIGHT:g} to {_MAX_WEIGHT:g}"
    hint = f"use {usual}, or ignore the column with --data.columns weight:null"
    weights, index, faults = table.read_column(column, parse, hint)
    return np.array([weight or 0.0 for weight in weights])[index], faults


def missing_files(
    table: TableFile, column: str, paths: Sequence[str], stats: FileStats, root: str
) -> list[Fault]:
    """Return the faults of the rows whose file does not exist."""
    faults: list[Fault] = []
    for row in np.flatnonzero(~stats.is_regular).tolist():
        path = paths[row]
        what = "is not a file" if stats.sizes[row] >= 0 else "does not exist"
        hint = f"relative paths are relative to {original(root)} (--data.root)"
        if "\\" in path:
            hint = "write paths with / instead of \\"
        elif not faults and (similar := _similar_file(path, root)):  # only the first is shown
            hint = f"there is {shown(original(similar))}"
        faults.append(table.fault(row, column, f"{shown(original(path))} {what}", hint))
    return faults


def _similar_file(path: str, root: str) -> str:
    """Return the image that the path of a missing file may mean; "" if none.

    Its name has another case, composition or suffix, or the path begins with a slash and is meant to be relative to the
    root. The folder itself must exist.
    """
    places = [path, os.path.normpath(root + path)] if path.startswith("/") else [path]
    for folder, name in map(os.path.split, places):
        if not os.path.isdir(folder or "."):
            continue
        spellings = _spellings(name)
        for other in sorted(os.listdir(folder or ".")):
            if is_image_file(other) and spellings & _spellings(other):
                return os.path.join(folder, other)
    return ""


def _spellings(name: str) -> set[str]:
    """Return a name, and the name without its suffix, as they are compared."""
    return {composed(text).casefold() for text in (name, os.path.splitext(name)[0])}
