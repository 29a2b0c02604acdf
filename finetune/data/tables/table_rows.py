"""The rows of a table: an image each, with its labels, split, group and weight, and what is wrong with them."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from finetune.data.addresses import is_address, shown_address
from finetune.data.local_folders import local_folder
from finetune.data.storage import (
    LOCAL,
    FileStats,
    file_stats,
    is_local,
    kind_of,
    normal_path,
    refresh,
    storage_of,
)
from finetune.data.tables.row_faults import Fault, describe
from finetune.data.tables.table_columns import Columns, find_columns, split_of_values
from finetune.data.tables.table_file import TableFile, read_table
from finetune.data.tables.table_labels import Labels, label_text, read_labels
from finetune.data.walk import is_image_file
from finetune.models.heads import LabelKind
from finetune.system.file_names import composed
from finetune.system.messages import shown, why_name_is_invalid

_NUM_TRIED = 20  # files that are looked for to find the folder of relative paths
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# Only the ratios of weights matter. In this range their products and sums are exact enough in float32.
_MIN_WEIGHT = 1e-9
_MAX_WEIGHT = 1e9


@dataclass(frozen=True)
class TableOptions:
    """How to read a table.

    Attributes:
        root: Folder that relative paths in the table are relative to; None for that of `folder_of`.
        columns: Column names by role, as `parse_columns` returns them.
        separator: The character between several labels; None finds it.
        labels: Whether an image has one label or several; `auto` decides by the table.
        exclude: Classes to exclude, by composed names.
        merge: New names of classes.
    """

    root: str | None = None
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    separator: str | None = None
    labels: Literal["auto", "single", "several"] = "auto"
    exclude: frozenset[str] = frozenset()
    merge: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TableRows:
    """The rows of a table, N.

    Attributes:
        lines: The line of the file where each row begins.
        paths: The path of each image.
        labels: The labels of each image, after classes were excluded and merged.
        splits: The split of each image; `all` if the table has no split column.
        groups: The group of each image; None if the table has no group column.
        weights: The weight of each image, (N,) float64; None if the table has no weight column.
        stats: Size and times of each file.
    """

    lines: list[int]
    paths: list[str]
    labels: list[tuple[str, ...]]
    splits: list[str]
    groups: list[str] | None
    weights: np.ndarray | None
    stats: FileStats

    def __len__(self) -> int:
        return len(self.lines)

    def take(self, rows: Sequence[int]) -> "TableRows":
        """Return the rows at these indices, in that order."""
        return TableRows(
            lines=[self.lines[i] for i in rows],
            paths=[self.paths[i] for i in rows],
            labels=[self.labels[i] for i in rows],
            splits=[self.splits[i] for i in rows],
            groups=None if self.groups is None else [self.groups[i] for i in rows],
            weights=None if self.weights is None else self.weights[np.array(rows, np.int64)],
            stats=self.stats.take(np.array(rows, np.int64)),
        )


@dataclass(frozen=True)
class TableContent:
    """A table as it was read.

    Attributes:
        root: Folder that relative paths in the table are relative to.
        rows: The rows without faults, each image once.
        faults: The faults of the other rows, by line.
        kind: Whether an image has one label or several.
        remark: What the columns mean, for a log line.
        label_column: The name of the label column.
        original_names: All labels before classes were excluded and merged.
        declared: The labels that have a column of 0 and 1, after classes were excluded and merged.
        num_repeated: Number of rows that repeat another one, and were dropped.
    """

    root: str
    rows: TableRows
    faults: list[Fault]
    kind: LabelKind
    remark: str
    label_column: str
    original_names: frozenset[str]
    declared: tuple[str, ...]
    num_repeated: int


def read_content(path: Path, options: TableOptions) -> TableContent:
    """Read a table and look at the files that it lists.

    Raises:
        OSError: The table cannot be read.
        ValueError: The file is not a table, or has no column for the paths or labels.
    """
    table = read_table(path)
    columns = find_columns(table, options.columns)
    labels, faults = read_labels(table, columns, options.labels, options.separator)
    root = folder_of(table, columns.path)
    if options.root:
        root = normal_path(local_folder(options.root))
    refresh(root)
    paths, path_faults = read_paths(table, columns.path, root)
    splits, split_faults = _read_splits(table, columns.split)
    groups, group_faults = _read_groups(table, columns.group)
    weights, weight_faults = _read_weights(table, columns.weight)
    faults += path_faults + split_faults + group_faults + weight_faults
    faults += _invalid_names(table, labels.values, labels.column)
    declared = [label_text(name) for name in columns.labels] if columns.has_indicators else []
    original_names = frozenset([*declared, *(name for of_row in labels.values for name in of_row)])
    changes = {of_row: _changed(of_row, options) for of_row in set(labels.values)}
    chosen = [changes[of_row] for of_row in labels.values]
    rows = TableRows(
        lines=table.lines,
        paths=paths,
        labels=chosen,
        splits=splits,
        groups=groups,
        weights=weights,
        stats=file_stats(paths),
    )
    missing = _missing_files(rows, columns.path, root, faulty={fault.row for fault in faults})
    # The rows of an excluded class are dropped, with their faults. With several labels an image loses the label only.
    dropped: set[int] = set()
    if labels.kind == "single":
        dropped = {row for row in range(len(rows)) if labels.values[row] and not chosen[row]}
    faults = [fault for fault in faults + missing if fault.row not in dropped]
    excluded = dropped | {fault.row for fault in faults}
    kept = [row for row in range(len(rows)) if row not in excluded]
    once, contradictions, num_repeated = _without_repeats(
        rows, kept, replace(columns, labels=(labels.column,)), options.labels == "several"
    )
    return TableContent(
        root=root,
        rows=once,
        faults=sorted(faults + contradictions, key=lambda fault: fault.row),
        kind=labels.kind,
        remark=_remark(columns, labels),
        label_column=labels.column,
        original_names=original_names,
        declared=_changed(tuple(declared), options),
        num_repeated=num_repeated,
    )


def _remark(columns: Columns, labels: Labels) -> str:
    """Return which columns are used, for a log line."""
    parts = [_in_column("path", "path", columns.path, columns)]
    if columns.has_indicators:
        parts.append(labels.how)
    else:
        parts.append(_in_column(labels.how, "label", labels.column, columns))
    for role, name in (("weight", columns.weight), ("group", columns.group)):
        if name is not None:
            parts.append(_in_column(f"{role}s", role, name, columns))
    if columns.split is not None:
        parts.append(_in_column("split", "split", columns.split, columns))
    return ", ".join(parts)


def _in_column(what: str, role: str, name: str, columns: Columns) -> str:
    """Return the text for one column, with the columns that could be meant and are not used."""
    text = f"{what} in column {name!r}"
    others = columns.others.get(role, ())
    return f"{text} (not {', '.join(map(repr, others))})" if others else text


def folder_of(table: TableFile, column: str) -> str:
    """Return the folder that relative paths in a table are relative to: that of the table, or the working directory.

    It is the working directory if the first files are there, and none is in the folder of the table. An example is the
    predictions.csv of a run.
    """
    folder = normal_path(table.path.parent)
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

    An address must be inside of `root`, so that an untrusted table cannot name another server.
    """
    prefix = "" if root == "." else os.path.join(root, "")
    paths: list[str] = []
    faults: list[Fault] = []
    for row, value in enumerate(table.columns[column]):
        text = value.strip() if isinstance(value, str) else label_text(value)
        has_scheme = "://" in text and _URL.match(text) is not None
        if not text:
            faults.append(Fault(row, table.lines[row], column, "the path is empty"))
        elif has_scheme and not is_address(text) and is_local(text):
            fault = f"{shown_address(text)!r} is an address, which is unsupported"
            hint = "download the images, and pass their paths"
            faults.append(Fault(row, table.lines[row], column, fault, hint))
        elif has_scheme and not (prefix and text.startswith(prefix)):
            fault = f"{shown_address(text)!r} is an address outside of the folder of the images"
            hint = "pass the address of their folder: as --data.root, or to predict in place of the table"
            faults.append(Fault(row, table.lines[row], column, fault, hint))
            text = ""
            has_scheme = False
        elif not _is_path(text):
            faults.append(Fault(row, table.lines[row], column, f"'{shown(text)}' is not a path"))
            text = ""
        path = text if text[:1] == "/" or has_scheme else prefix + text
        place = path.partition("://")[2] or path
        is_plain = "./" not in place and "//" not in place and not place.endswith("/..")
        paths.append(path if is_plain else _normal(path))
    return paths, faults


def _normal(path: str) -> str:
    """Return a path without redundant parts, so that two rows of one image have the same path."""
    return os.path.normpath(path) if storage_of(path) is LOCAL else normal_path(path)


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
        first = faults[0]
        raise ValueError(f"{describe(path, first)}{f'; {first.hint}' if first.hint else ''}")
    return paths


def _read_splits(table: TableFile, column: str | None) -> tuple[list[str], list[Fault]]:
    if column is None:
        return ["all"] * len(table), []
    splits: list[str] = []
    faults: list[Fault] = []
    split_of = split_of_values(column)
    for row, value in enumerate(table.columns[column]):
        text = label_text(value)
        split = split_of.get(text.lower(), "")
        if not split:
            fault = f"'{shown(text)}' is not a split" if text else "the split is empty"
            hint = "use train, val or test, or ignore the column with --data.columns split:null"
            faults.append(Fault(row, table.lines[row], column, fault, hint))
        splits.append(split)
    return splits, faults


def _read_groups(table: TableFile, column: str | None) -> tuple[list[str] | None, list[Fault]]:
    if column is None:
        return None, []
    groups = [label_text(value) for value in table.columns[column]]
    reasons = {group: why_name_is_invalid(group) for group in set(groups)}
    if "" in reasons:
        reasons[""] = "is empty"
    faults = [
        Fault(row, table.lines[row], column, f"the group {reasons[group]}")
        for row, group in enumerate(groups)
        if reasons[group]
    ]
    return groups, faults


def _read_weights(table: TableFile, column: str | None) -> tuple[np.ndarray | None, list[Fault]]:
    if column is None:
        return None, []
    weights = np.ones(len(table))
    faults: list[Fault] = []
    for row, value in enumerate(table.columns[column]):
        weight = _weight(value)
        if weight is None:
            text = label_text(value)
            fault = f"'{shown(text)}' is not a weight" if text else "the weight is empty"
            hint = (
                f"use 0 or a number from {_MIN_WEIGHT:g} to {_MAX_WEIGHT:g}"
                ", or ignore the column with --data.columns weight:null"
            )
            faults.append(Fault(row, table.lines[row], column, fault, hint))
        else:
            weights[row] = weight
    return weights, faults


def _weight(value: Any) -> float | None:
    """Return the weight of an image from the value in a table; None if it is not a weight."""
    if isinstance(value, bool):
        return None
    try:
        weight = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return weight if weight == 0 or _MIN_WEIGHT <= weight <= _MAX_WEIGHT else None


def _invalid_names(table: TableFile, labels: Sequence[tuple[str, ...]], column: str) -> list[Fault]:
    """Return the rows with a label that cannot be the name of a class."""
    names = {label for of_row in set(labels) for label in of_row}
    reasons = {label: why_name_is_invalid(label) for label in names}
    invalid = {label: reason for label, reason in reasons.items() if reason}
    if not invalid:
        return []
    return [
        Fault(row, table.lines[row], column, f"the label '{shown(label)}' {invalid[label]}")
        for row, of_row in enumerate(labels)
        for label in of_row
        if label in invalid
    ]


def _changed(labels: tuple[str, ...], options: TableOptions) -> tuple[str, ...]:
    """Return labels without excluded classes and with the new names of merged ones."""
    if not options.exclude and not options.merge:
        return labels
    kept = (label for label in labels if label not in options.exclude)
    return tuple(dict.fromkeys(options.merge.get(label, label) for label in kept))


def _missing_files(rows: TableRows, column: str, root: str, faulty: set[int]) -> list[Fault]:
    """Return the faults of the rows whose file does not exist, except rows that are known to be faulty."""
    faults: list[Fault] = []
    for row in np.flatnonzero(~rows.stats.is_regular).tolist():
        if row in faulty:
            continue
        path = rows.paths[row]
        what = "is not a file" if rows.stats.sizes[row] >= 0 else "does not exist"
        hint = f"relative paths are relative to {root} (--data.root)"
        if "\\" in path:
            hint = "write paths with / instead of \\"
        elif not faults and (similar := _similar_file(path, root)):  # only the first is shown
            hint = f"there is {shown(similar)}"
        faults.append(Fault(row, rows.lines[row], column, f"{shown(path)} {what}", hint))
    return faults


def _similar_file(path: str, root: str) -> str:
    """Return the image that the path of a missing file may mean; "" if there is none.

    It has another letter case, Unicode composition or suffix, or lies below the root.
    """
    if not (is_local(path) and is_local(root)):
        return ""
    for start in ("/", root) if path[:1] == "/" else ("",):
        found = start
        for part in path.strip("/").split("/"):
            found = os.path.join(found, _similar_name(found or ".", part))
        if is_image_file(found) and os.path.isfile(found):
            return found
    return ""


def _similar_name(folder: str, name: str) -> str:
    """Return the name in a folder that is like a name, images first; the name itself if there is none."""
    if os.path.exists(os.path.join(folder, name)) or not os.path.isdir(folder):
        return name
    names = sorted(os.listdir(folder), key=lambda other: (not is_image_file(other), other))
    spellings = _spellings(name)
    return next((other for other in names if spellings & _spellings(other)), name)


def _spellings(name: str) -> set[str]:
    """Return a name, and the name without its suffix, as they are compared."""
    return {composed(text).casefold() for text in (name, os.path.splitext(name)[0])}


def _without_repeats(
    rows: TableRows, kept: Sequence[int], columns: Columns, is_union: bool
) -> tuple[TableRows, list[Fault], int]:
    """Return the rows with each image once, the contradictions between rows, and the number of repeated rows.

    Args:
        rows: The rows.
        kept: The indices of rows to look at.
        columns: The columns, of which one has the labels.
        is_union: An image in several rows has the labels of all. Otherwise their labels must agree.
    """
    column = columns.labels[0]
    first_of: dict[str, int] = {}
    labels = list(rows.labels)
    faults: list[Fault] = []
    repeated: list[int] = []
    for row in kept:
        first = first_of.setdefault(rows.paths[row], row)
        if first == row:
            continue
        repeated.append(row)
        if rows.splits[first] != rows.splits[row]:
            texts = {i: rows.splits[i] for i in (first, row)}
            faults += _contradiction(rows, first, row, columns.split or column, texts)
        elif rows.groups is not None and rows.groups[first] != rows.groups[row]:
            texts = {i: rows.groups[i] for i in (first, row)}
            faults += _contradiction(rows, first, row, columns.group or column, texts)
        elif rows.weights is not None and rows.weights[first] != rows.weights[row]:
            texts = {i: f"{rows.weights[i]:g}" for i in (first, row)}
            faults += _contradiction(rows, first, row, columns.weight or column, texts)
        elif is_union:
            labels[first] = tuple(dict.fromkeys(labels[first] + labels[row]))
        elif set(labels[first]) != set(labels[row]):
            texts = {i: ", ".join(rows.labels[i]) or "without a label" for i in (first, row)}
            hint = "if images have several labels, pass --data.labels several"
            faults += _contradiction(rows, first, row, column, texts, hint)
    wrong = {rows.paths[fault.row] for fault in faults}
    once = [row for path, row in first_of.items() if path not in wrong]
    num_repeated = sum(rows.paths[row] not in wrong for row in repeated)
    return replace(rows, labels=labels).take(once), faults, num_repeated


def _contradiction(
    rows: TableRows, first: int, second: int, column: str, values: Mapping[int, str], hint: str = ""
) -> list[Fault]:
    """Return the faults of two rows of one image that have different values."""
    path = shown(rows.paths[first])
    return [
        Fault(
            row,
            rows.lines[row],
            column,
            f"{path} is {shown(values[row])!r} here and {shown(values[other])!r} in line {rows.lines[other]}",
            hint,
        )
        for row, other in ((first, second), (second, first))
    ]
