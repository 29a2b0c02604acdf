"""A table as a data set.

The name of an image is its path below the root, and images have the order of class folders. So a fit on a table and a
fit on the folders in its root have the same splits, batches and weights.
"""

import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from finetune.data.data_set import DataSet, check_names_exist
from finetune.data.faults import Fault
from finetune.data.file_entries import FileStats
from finetune.data.image_files import file_stats, normal_path, refresh
from finetune.data.local_folders import local_folder
from finetune.data.samples import PathList, Samples
from finetune.data.tables.table_columns import Columns, find_columns, may_be_split
from finetune.data.tables.table_file import TableFile, read_table
from finetune.data.tables.table_labels import Labels, combining_mark, label_text, read_labels
from finetune.data.tables.table_rows import (
    SPLITS,
    contradictions,
    folder_of,
    missing_files,
    read_groups,
    read_paths,
    read_splits,
    read_weights,
    repeated_rows,
)
from finetune.data.targets import ClassIndex, MultiHot, Targets
from finetune.system.file_names import composed
from finetune.system.messages import counted, shown, why_name_is_invalid


@dataclass(frozen=True)
class ScanOptions:
    """How to read a data set. For a folder only `exclude` and `merge` have a meaning.

    Attributes:
        root: Folder that relative paths in a table are relative to; None for that of `folder_of`.
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
class _Rows:
    """The rows of a table, N.

    Attributes:
        table: The table.
        columns: Its columns.
        root: Folder that relative paths are relative to.
        paths: The path of each image.
        labels: The labels of each row, after classes were excluded and merged.
        splits: The index into `SPLITS` of each row, (N,).
        groups: The group of each row, (N,) uint64; None if the table has no groups.
        weights: The weight of each row, (N,) float64; None if the table has no weights.
        stats: Size and times of each file.
    """

    table: TableFile
    columns: Columns
    root: str
    paths: list[str]
    labels: Labels
    splits: np.ndarray
    groups: np.ndarray | None
    weights: np.ndarray | None
    stats: FileStats


def scan_table(
    path: Path, options: ScanOptions, class_names: Sequence[str] | None = None
) -> DataSet:
    """Read a table, and look at the files that it lists.

    Args:
        path: The table.
        options: How to read it.
        class_names: The classes in order, for example of a checkpoint; None for those of the training images.

    Raises:
        OSError: The table cannot be read.
        ValueError: The file is not a table, or has no column for the paths or labels.
    """
    table = read_table(path)
    columns = find_columns(table, options.columns)
    written, faults = read_labels(table, columns, options.labels, options.separator)
    faults += _invalid_names(table, written)
    root = folder_of(table, columns.path)
    if options.root:
        root = normal_path(local_folder(options.root))
    refresh(root)
    paths, path_faults = read_paths(table, columns.path, root)
    splits, split_faults = read_splits(table, columns.split)
    groups, group_faults = read_groups(table, columns.group)
    weights, weight_faults = read_weights(table, columns.weight)
    faults += path_faults + split_faults + group_faults + weight_faults
    stats = file_stats(paths)
    faulty = {fault.row for fault in faults}
    faults += missing_files(table, columns.path, paths, stats, root, faulty)
    labels = replace(written, sets=[_changed(labels, options) for labels in written.sets])
    rows = _Rows(table, columns, root, paths, labels, splits, groups, weights, stats)
    # The rows of an excluded class are dropped, with their faults. With several labels an image loses the label only.
    is_dropped = np.zeros(len(table), bool)
    if labels.kind == "single":
        pairs = zip(written.sets, labels.sets, strict=True)
        is_dropped = np.array([bool(old) and not new for old, new in pairs])[labels.set_of]
    faults = [fault for fault in faults if not is_dropped[fault.row]]
    is_kept = ~is_dropped
    is_kept[[fault.row for fault in faults]] = False
    rows, kept, more_faults, num_repeated = _without_repeats(
        rows, np.flatnonzero(is_kept), is_union=options.labels == "several"
    )
    parts = {
        name: kept[rows.splits[kept] == k]
        for k, name in enumerate(SPLITS)
        if (rows.splits[kept] == k).any()
    }
    declared = _changed(tuple(map(label_text, columns.labels)), options)
    notes: list[str] = []
    class_faults: list[Fault] = []
    if class_names is None:
        original = {*map(label_text, columns.labels)} if columns.has_indicators else set()
        original.update(label for labels in written.sets for label in labels)
        check_names_exist("--data.exclude", options.exclude, original)
        check_names_exist("--data.merge", options.merge, original)
        trained = _labels_in(rows, parts.get("train", parts.get("all", kept[:0])))
        class_faults = _class_faults(
            rows, parts, trained, declared if columns.has_indicators else ()
        )
        notes = _notes(rows, sorted(trained), declared, options)
        known: Sequence[str] = sorted(trained)
    else:
        known = class_names
    unknown = _unknown_labels(rows, parts, known)
    found = sorted({*known, *unknown}) if class_names is None else [*known, *sorted(unknown)]
    return DataSet(
        class_names=found,
        splits={name: _samples(rows, of_split, found) for name, of_split in parts.items()},
        place=str(path),
        folder=root,
        label_kind=labels.kind,
        has_splits=columns.split is not None,
        is_table=True,
        faults=(
            *sorted(faults + more_faults, key=lambda fault: fault.row),
            *class_faults,
            *(unknown.values() if known else ()),
        ),
        notes=tuple(notes),
        remark=_remark(columns, labels, num_repeated),
    )


def _remark(columns: Columns, labels: Labels, num_repeated: int) -> str:
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
    if num_repeated:
        repeat = counted(num_repeated, "row repeats", "rows repeat")
        parts.append(f"{repeat} another one and count once")
    return ", ".join(parts)


def _in_column(what: str, role: str, name: str, columns: Columns) -> str:
    """Return the text for one column, with the columns that could be meant and are not used."""
    text = f"{what} in column {name!r}"
    others = columns.others.get(role, ())
    return f"{text} (not {', '.join(map(repr, others))})" if others else text


def _invalid_names(table: TableFile, labels: Labels) -> list[Fault]:
    """Return the rows with a label that cannot be the name of a class."""
    names = {label for labels_of_row in labels.sets for label in labels_of_row}
    reasons = {label: reason for label in names if (reason := why_name_is_invalid(label))}
    is_invalid = np.array([not reasons.keys().isdisjoint(names) for names in labels.sets], bool)
    return [
        table.fault(row, labels.column, f"the label '{shown(label)}' {reasons[label]}")
        for row in np.flatnonzero(is_invalid[labels.set_of]).tolist()
        for label in labels.sets[labels.set_of[row]]
        if label in reasons
    ]


def _changed(labels: tuple[str, ...], options: ScanOptions) -> tuple[str, ...]:
    """Return labels without excluded classes and with the new names of merged ones."""
    kept = (label for label in labels if label not in options.exclude)
    return tuple(dict.fromkeys(options.merge.get(label, label) for label in kept))


def _without_repeats(
    rows: _Rows, kept: np.ndarray, is_union: bool
) -> tuple[_Rows, np.ndarray, list[Fault], int]:
    """Return the rows, the indices of those that remain, the contradictions, and the number of repeated rows.

    Args:
        rows: The rows.
        kept: The indices of rows to look at, ascending.
        is_union: An image in several rows has the labels of all. Otherwise their labels must agree.
    """
    repeats, firsts = repeated_rows(rows.paths, kept)
    if not len(repeats):
        return rows, kept, [], 0
    number_of: dict[frozenset[str], int] = {}
    numbers = np.array(
        [number_of.setdefault(frozenset(s), len(number_of)) for s in rows.labels.sets]
    )

    def label_of(row: int) -> str:
        return ", ".join(rows.labels.sets[rows.labels.set_of[row]]) or "without a label"

    def cell(column: str | None) -> Callable[[int], str]:
        return lambda row: label_text(rows.table.columns[column or ""][row])

    several = "if images have several labels, pass --data.labels several"
    names = rows.columns
    labels = None if is_union else numbers[rows.labels.set_of]
    compared = [
        (names.split, rows.splits, cell(names.split), ""),
        (names.group, rows.groups, cell(names.group), ""),
        (names.weight, rows.weights, cell(names.weight), ""),
        (rows.labels.column, labels, label_of, several),
    ]
    is_settled = np.zeros(len(repeats), bool)  # whether a pair has a contradiction already
    faults: list[Fault] = []
    for column, values, text_of, hint in compared:
        if column is None or values is None:
            continue
        differs = (values[repeats] != values[firsts]) & ~is_settled
        is_settled |= differs
        pairs = [*zip(firsts[differs].tolist(), repeats[differs].tolist(), strict=True)]
        faults += contradictions(rows.table, column, rows.paths, pairs, text_of, hint)
    wrong = {rows.paths[fault.row] for fault in faults}
    is_wrong = np.array([rows.paths[row] in wrong for row in firsts.tolist()], bool)
    if is_union:
        rows = replace(rows, labels=_joined(rows.labels, firsts[~is_wrong], repeats[~is_wrong]))
    removed = np.concatenate([repeats, firsts[is_wrong]])
    return rows, np.setdiff1d(kept, removed), faults, int((~is_wrong).sum())


def _joined(labels: Labels, firsts: np.ndarray, repeats: np.ndarray) -> Labels:
    """Return the labels with those of repeated rows in the first row of each image."""
    sets = list(labels.sets)
    set_of = labels.set_of.copy()
    for first, repeat in zip(firsts.tolist(), repeats.tolist(), strict=True):
        sets.append(tuple(dict.fromkeys(sets[set_of[first]] + sets[set_of[repeat]])))
        set_of[first] = len(sets) - 1
    return replace(labels, sets=sets, set_of=set_of)


def _labels_in(rows: _Rows, indices: np.ndarray) -> set[str]:
    """Return the labels that occur in these rows."""
    sets = np.unique(rows.labels.set_of[indices]).tolist()
    return {label for k in sets for label in rows.labels.sets[k]}


def _class_faults(
    rows: _Rows, parts: Mapping[str, np.ndarray], trained: Collection[str], declared: Sequence[str]
) -> list[Fault]:
    """Return what is wrong with the classes of a table for training.

    Args:
        rows: The rows.
        parts: The indices of the rows of each split.
        trained: The labels of the training images.
        declared: The labels that have a column of 0 and 1.
    """
    where = str(rows.table.path)
    if "train" not in parts and "all" not in parts:
        others = " and ".join(map(repr, parts))
        what = f"it has rows of {others} but none of 'train'" if others else "it has no images"
        return [Fault(where, what, "add the training images")]
    if len(trained) < 2:
        only = f"only the class {next(iter(trained))!r}" if trained else "no class"
        return [Fault(where, f"it has {only}", "a classifier needs at least two")]
    return [
        Fault(
            where,
            f"it has no training image of the label {label}: no row that is trained on has 1 in its column",
            f"add some, or skip it with --data.exclude {shlex.quote(label)}",
        )
        for label in sorted(set(declared) - set(trained))
    ]


def _notes(
    rows: _Rows, class_names: Sequence[str], declared: Sequence[str], options: ScanOptions
) -> list[str]:
    """Return what looks like a mistake in the table, and need not be one."""
    path = rows.table.path
    notes = []
    if rows.columns.has_indicators and "split" not in options.columns:
        notes = [
            f"{path}: the column {name!r} of 0 and 1 is a label; if it is the split, pass --data.columns split:{name}"
            for name in filter(may_be_split, declared)
        ]
    if rows.labels.kind == "single" and (mark := combining_mark(class_names)):
        notes.append(
            f"{path}: many classes combine other classes; if images have several labels, "
            f"pass --data.label_separator {mark!r}"
        )
    return notes


def _unknown_labels(
    rows: _Rows, parts: Mapping[str, np.ndarray], class_names: Sequence[str]
) -> dict[str, Fault]:
    """Return the labels that are not among the classes, with a fault of the first row of each."""
    faults: dict[str, Fault] = {}
    known = set(class_names)
    is_unknown = np.array([not known.issuperset(labels) for labels in rows.labels.sets], bool)
    for indices in parts.values():
        for row in indices[is_unknown[rows.labels.set_of[indices]]].tolist():
            for label in rows.labels.sets[rows.labels.set_of[row]]:
                if label in known or label in faults:
                    continue
                text = f"{label!r} is not in the training classes {', '.join(class_names)}"
                hint = f"correct it, or skip the class with --data.exclude {shlex.quote(label)}"
                fault = rows.table.fault(row, rows.labels.column, text, hint)
                faults[label] = fault._replace(can_skip=False, row=-1)
    return faults


def _samples(rows: _Rows, indices: np.ndarray, class_names: Sequence[str]) -> Samples:
    """Return the images of a split, sorted as in class folders: by class, then by name; of several labels by name."""
    index_of = {name: k for k, name in enumerate(class_names)}
    prefix = os.path.join(rows.root, "")
    order = _sorted_rows([rows.paths[row].removeprefix(prefix) for row in indices.tolist()])
    indices = indices[order]
    sets = rows.labels.sets
    targets: Targets
    if rows.labels.kind == "single":
        # a set of a faulty row may be empty, or of an unknown label
        class_of = np.array([index_of.get(labels[0], -1) if labels else -1 for labels in sets])
        classes = class_of[rows.labels.set_of[indices]].astype(np.int64)
        by_class = np.argsort(classes, kind="stable")
        indices = indices[by_class]
        targets = ClassIndex(classes[by_class], len(class_names))
    else:
        has_label = np.zeros((len(sets), len(class_names)), np.uint8)
        for k, labels in enumerate(sets):
            has_label[k, [index_of[label] for label in labels if label in index_of]] = 1
        targets = MultiHot(has_label[rows.labels.set_of[indices]])
    return Samples(
        PathList(rows.paths[row] for row in indices.tolist()),
        targets,
        folder=rows.root,
        stats=rows.stats.take(indices),
        groups=None if rows.groups is None else rows.groups[indices],
        weights=None if rows.weights is None else rows.weights[indices],
    )


def _sorted_rows(names: Sequence[str]) -> list[int]:
    """Return the indices of names in the order in which `walk.find_images` lists them: by their parts, composed."""
    if all(map(str.isascii, names)):
        # the same, but much faster: no part of a path has a zero byte
        keys: list[Any] = [name.replace("/", "\0") for name in names]
    else:
        keys = [tuple((composed(part), part) for part in name.split("/")) for name in names]
    return sorted(range(len(names)), key=keys.__getitem__)
