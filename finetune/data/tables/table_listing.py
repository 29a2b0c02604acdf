"""The images of a table.

The name of an image is its path below the root, and images have the order of class folders. So a fit on a table and a
fit on the folders in its root have the same splits, batches and weights.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.faults import Fault
from finetune.data.image_files import file_stats, normal_path
from finetune.data.listing import SPLITS, Listing, ScanOptions
from finetune.data.local_folders import local_folder
from finetune.data.samples import PathList
from finetune.data.tables.table_columns import Columns, find_columns, may_be_split
from finetune.data.tables.table_file import TableFile, read_table
from finetune.data.tables.table_labels import Labels, combining_mark, label_text, read_labels
from finetune.data.tables.table_rows import (
    folder_of,
    missing_files,
    read_groups,
    read_paths,
    read_splits,
    read_weights,
)
from finetune.system.file_names import composed
from finetune.system.messages import counted, shown


def list_table(path: Path, options: ScanOptions) -> Listing:
    """Read a table, and look at the files that it lists.

    Args:
        path: The table.
        options: How to read it.

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
    paths, of_paths = read_paths(table, columns.path, root)
    paths = _below(root, paths)
    values, of_values = _read_values(table, columns)
    faults += of_paths + of_values
    stats = file_stats(paths)
    faulty = {fault.row for fault in faults}
    missing = missing_files(table, columns.path, paths, stats, root)
    faults += [fault for fault in missing if fault.row not in faulty]
    columns_of_0_and_1 = [*map(label_text, columns.labels)] if columns.has_indicators else []
    existing = {*columns_of_0_and_1, *(label for labels in labels.sets for label in labels)}
    labels, is_kept = _without_excluded(labels, options)
    faults = [fault for fault in faults if is_kept[fault.row]]
    is_kept[[fault.row for fault in faults]] = False
    rows = np.flatnonzero(is_kept)
    labels, rows, num_repeated, contradictions = _without_repeats(
        table, labels, paths, values, rows, is_union=options.labels == "several"
    )
    prefix = os.path.join(root, "")
    rows = rows[_by_name([paths[row].removeprefix(prefix) for row in rows.tolist()])]
    values = {name: column[rows] for name, column in values.items()}
    listing = Listing(
        place=str(path),
        folder=root,
        paths=PathList(paths[row] for row in rows.tolist()),
        label_sets=labels.sets,
        set_of=labels.set_of[rows],
        split_of=values.get(columns.split, np.zeros(len(rows), np.int64)),
        stats=stats.take(rows),
        existing=existing,
        needed=options.changed(columns_of_0_and_1),
        has_splits=columns.split is not None,
        label_kind=labels.kind,
        groups=values.get(columns.group),
        weights=values.get(columns.weight),
        where=lambda i: table.where(int(rows[i]), labels.column),
        faults=tuple(sorted(faults + contradictions, key=lambda fault: fault.row)),
        remark=_remark(columns, labels, num_repeated),
    )
    return replace(listing, notes=tuple(_notes(listing, options)))


def _below(root: str, paths: Sequence[str]) -> list[str]:
    """Return paths of which the absolute ones below a relative root begin with it, as the relative ones do."""
    prefix = "" if root == "." else os.path.join(root, "")
    absolute = os.path.join(os.path.abspath(root), "")
    return [
        prefix + path.removeprefix(absolute) if path.startswith(absolute) else path
        for path in paths
    ]


def _read_values(
    table: TableFile, columns: Columns
) -> tuple[dict[str | None, np.ndarray], list[Fault]]:
    """Return the split, group and weight of each row by column, (N,) each, and the faulty rows."""
    values: dict[str | None, np.ndarray] = {}
    faults: list[Fault] = []
    for column, read in (
        (columns.split, read_splits),
        (columns.group, read_groups),
        (columns.weight, read_weights),
    ):
        if column is not None:
            values[column], of_column = read(table, column)
            faults += of_column
    return values, faults


def _without_excluded(labels: Labels, options: ScanOptions) -> tuple[Labels, np.ndarray]:
    """Return the labels without excluded classes, and which rows are kept, (N,).

    The rows of an excluded class are dropped, with their faults. With several labels an image loses the label only.
    """
    changed = replace(labels, sets=[options.changed(names) for names in labels.sets])
    if labels.kind == "several":
        return changed, np.ones(len(labels.set_of), bool)
    pairs = zip(labels.sets, changed.sets, strict=True)
    return changed, np.array([bool(new) or not old for old, new in pairs], bool)[labels.set_of]


def _remark(columns: Columns, labels: Labels, num_repeated: int) -> str:
    """Return which columns are used, for a log line."""
    parts = [f"path in column {columns.path!r}", labels.how]
    if not columns.has_indicators:
        parts[1] += f" in column {labels.column!r}"
    for what in ("weight", "group", "split"):
        if column := getattr(columns, what):
            parts.append(f"{what} in column {column!r}")
    if num_repeated:
        repeat = counted(num_repeated, "row repeats", "rows repeat")
        parts.append(f"{repeat} another one: each image counts once")
    return ", ".join(parts)


def _notes(listing: Listing, options: ScanOptions) -> list[str]:
    """Return what looks like a mistake in the table, and need not be one."""
    notes = []
    if "split" not in options.columns:
        notes = [
            f"{listing.place}: the column {name!r} of 0 and 1 is a label; if it is the split, "
            f"pass --data.columns split:{name}"
            for name in filter(may_be_split, listing.needed)
        ]
    trained = listing.labels_in(listing.split_of <= SPLITS.index("train"))
    if listing.label_kind == "single" and (mark := combining_mark(sorted(trained))):
        notes.append(
            f"{listing.place}: many classes combine other classes; if images have several labels, "
            f"pass --data.label_separator {mark!r}"
        )
    return notes


def _without_repeats(
    table: TableFile,
    labels: Labels,
    paths: Sequence[str],
    values: Mapping[str | None, np.ndarray],
    rows: np.ndarray,
    is_union: bool,
) -> tuple[Labels, np.ndarray, int, list[Fault]]:
    """Return the labels, the indices of the rows that remain, how many repeat one of them, and a fault for each row
    that contradicts another one.

    Args:
        table: The table.
        labels: The labels of its rows.
        paths: The path of each row.
        values: The splits, groups and weights of the rows, by column.
        rows: The indices of the rows to look at, ascending.
        is_union: An image in several rows has the labels of all. Otherwise their labels must agree.
    """
    first_of: dict[str, int] = {}
    firsts = np.array(
        [first_of.setdefault(os.path.abspath(paths[row]), row) for row in rows.tolist()], np.int64
    )
    repeats = rows[firsts != rows]
    if not len(repeats):
        return labels, rows, 0, []
    firsts = firsts[firsts != rows]
    compared = dict(values)
    if not is_union:
        numbers: dict[frozenset[str], int] = {}
        number_of = [numbers.setdefault(frozenset(names), len(numbers)) for names in labels.sets]
        compared[labels.column] = np.array(number_of)[labels.set_of]
    column_of: dict[
        int, tuple[str | None, int]
    ] = {}  # of a faulty row: the column, and the other row
    for column, of_rows in compared.items():
        differs = of_rows[repeats] != of_rows[firsts]
        for first, repeat in zip(firsts[differs].tolist(), repeats[differs].tolist(), strict=True):
            column_of.setdefault(first, (column, repeat))
            column_of.setdefault(repeat, (column, first))
    faults = []
    for row, (column, other) in column_of.items():
        hint = ""
        if column == labels.column:
            hint = "if images have several labels, pass --data.labels several"
        text = f"{shown(paths[row])} has another {column} in line {table.lines[other]}"
        faults.append(table.fault(row, column or "", text, hint))
    if is_union:
        labels = _joined(labels, firsts, repeats)
    is_wrong = np.isin(firsts, [*column_of])
    rows = np.setdiff1d(rows, np.concatenate([repeats, firsts[is_wrong]]))
    return labels, rows, int(np.count_nonzero(~is_wrong)), faults


def _joined(labels: Labels, firsts: np.ndarray, repeats: np.ndarray) -> Labels:
    """Return the labels with those of repeated rows in the first row of each image."""
    sets = list(labels.sets)
    set_of = labels.set_of.copy()
    for first, repeat in zip(firsts.tolist(), repeats.tolist(), strict=True):
        sets.append(tuple(dict.fromkeys(sets[set_of[first]] + sets[set_of[repeat]])))
        set_of[first] = len(sets) - 1
    return replace(labels, sets=sets, set_of=set_of)


def _by_name(names: Sequence[str]) -> list[int]:
    """Return the indices of names in the order in which `walk.find_images` lists them: by their parts, composed."""
    if all(map(str.isascii, names)):
        # the same, but much faster: no part of a path has a zero byte
        keys: list[Any] = [name.replace("/", "\0") for name in names]
    else:
        keys = [tuple((composed(part), part) for part in name.split("/")) for name in names]
    return sorted(range(len(names)), key=keys.__getitem__)
