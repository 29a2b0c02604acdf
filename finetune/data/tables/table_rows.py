"""The rows of a table as images: the path, labels, split, group and weight of each, and what is wrong with them.

The name of an image is its path below the root, and images have the order of class folders. So a fit on a table and a
fit on the folders in its root have the same splits, batches and weights.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.addresses import is_in_bucket
from finetune.data.corrections import COLUMNS, EXCLUDED, WITHDRAWN
from finetune.data.faults import Fault
from finetune.data.image_files import FileStats, file_stats, kind_of, normal_path
from finetune.data.listing import SPLITS, Listing, ScanOptions
from finetune.data.local_folders import local_folder
from finetune.data.samples import PathList
from finetune.data.splits import group_ids
from finetune.data.tables.table_columns import TRUTH, Columns, find_columns, split_of_values
from finetune.data.tables.table_file import TableFile, read_table
from finetune.settings.schema import LabelKind, LabelsOfTable
from finetune.system.file_names import composed
from finetune.system.messages import WrongUsage, counted, shown, why_name_is_invalid

_NUM_TRIED = 20  # files that are looked for to find the folder of relative paths
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# Separators of labels that are found automatically. Others are too frequent in names.
_SEPARATORS = (";", "|")
_SEPARATOR_OPTION = "--data.label_separator"
# Lists and objects, as pandas, NumPy, JSON and databases write them.
_LIST = re.compile(r"\[.*\]|\{.*\}|\(\s*['\"].*\)", re.DOTALL)
# Only the ratios of weights matter. In this range their products and sums are exact enough in float32.
_MIN_WEIGHT = 1e-9
_MAX_WEIGHT = 1e9
# for each optional column what to do about a faulty value
_HINTS = {
    "split": "use train, val or test, or ignore the column with --data.columns split:null",
    "group": "",
    "weight": f"use 0 or a number from {_MIN_WEIGHT:g} to {_MAX_WEIGHT:g}, "
    "or ignore the column with --data.columns weight:null",
}


@dataclass(frozen=True)
class Labels:
    """The labels of the rows of a table, N.

    Attributes:
        kind: Whether an image has one label or several.
        of_rows: The labels of each row: exactly one, or any number; () for faulty rows.
        how: How they are written, for a log line.
        column: Name of the column, for error messages.
        faults: The rows whose labels are faulty.
    """

    kind: LabelKind
    of_rows: list[tuple[str, ...]]
    how: str
    column: str
    faults: list[Fault]


def list_table(path: Path, options: ScanOptions) -> Listing:
    """Read a table, and look at the files that it lists.

    Args:
        path: The table.
        options: How to read it.

    Raises:
        OSError: The table cannot be read.
        ValueError: The file is not a table, or has no column for the paths or labels.
    """
    table = _decided(read_table(path))
    columns = find_columns(table, options.columns)
    labels = read_labels(table, columns, options.labels, options.separator)
    root = folder_of(table, columns.path)
    if options.root:
        root = normal_path(local_folder(options.root))
    paths, of_paths = _read_paths(table, columns.path, root)
    values, of_values = _read_values(table, columns)
    stats = file_stats(paths)
    missing = _missing_files(table, columns.path, paths, stats, root)
    # of a row the first fault counts
    faults = {fault.row: fault for fault in missing + of_values + of_paths + labels.faults}
    indicators = [*map(_label_text, columns.labels)] if columns.has_indicators else []
    existing = {*indicators, *chain.from_iterable(labels.of_rows)}
    changed = {old: options.changed(old) for old in {*labels.of_rows}}
    excluded: set[int] = set()
    for row, old in enumerate(labels.of_rows):
        labels.of_rows[row] = changed[old]
        # with several labels an image only loses the label of an excluded class
        if labels.kind == "single" and old and not changed[old]:
            excluded.add(row)
            faults.pop(row, None)
    kept = [row for row in range(len(table)) if row not in faults and row not in excluded]
    is_joined = options.labels == "several"
    kept, contradictions, num_repeated = _merged(table, labels, paths, values, kept, is_joined)
    prefix = os.path.join(root, "")
    order = _by_name([paths[row].removeprefix(prefix) for row in kept])
    rows = np.array(kept, np.int64)[order]
    return Listing(
        place=str(path),
        folder=root,
        paths=PathList(paths[row] for row in rows.tolist()),
        labels=[labels.of_rows[row] for row in rows.tolist()],
        split_of=values[columns.split][rows] if columns.split else np.zeros(len(rows), np.int64),
        stats=stats.take(rows),
        existing=existing,
        needed=options.changed(indicators),
        has_splits=columns.split is not None,
        label_kind=labels.kind,
        groups=values[columns.group][rows] if columns.group else None,
        group_names=dict(zip(*_groups(table, columns, values), strict=True)),
        weights=values[columns.weight][rows] if columns.weight else None,
        where=lambda i: table.where(int(rows[i]), labels.column),
        faults=tuple(sorted([*faults.values(), *contradictions], key=lambda fault: fault.row)),
        remark=_remark(columns, labels, num_repeated),
    )


def _decided(table: TableFile) -> TableFile:
    """Return the labels in a file of `finetune review` of images that had none: those of the last row of each image."""
    if tuple(table.columns) != COLUMNS or any(table.columns["was"]):
        return table
    paths = table.columns["path"]
    labels = table.columns["now"]
    last = {_label_text(path): row for row, path in enumerate(paths)}
    rows = [row for row in last.values() if labels[row] not in (WITHDRAWN, EXCLUDED)]
    if not rows:
        raise ValueError(f"{table.path} has no labels yet: answer some in finetune review")
    columns = {"path": [paths[row] for row in rows], "label": [labels[row] for row in rows]}
    return TableFile(table.path, columns, [table.lines[row] for row in rows])


def _merged(
    table: TableFile,
    labels: Labels,
    paths: Sequence[str],
    values: Mapping[str, np.ndarray],
    rows: Sequence[int],
    is_joined: bool,
) -> tuple[list[int], list[Fault], int]:
    """Return the first row of each image, the faults of rows that contradict each other, and how many repeat one.

    Args:
        table: The table.
        labels: The labels of its rows. With `is_joined` the first row of an image gets those of all its rows.
        paths: The path of each row.
        values: The splits, groups and weights of the rows, by column.
        rows: The rows without faults, ascending.
        is_joined: Whether an image may have a row for each label. Otherwise the labels of its rows must agree.
    """
    first_of: dict[str, int] = {}
    faults: dict[int, Fault] = {}
    repeats: list[int] = []  # the first rows that are repeated
    for row in rows:
        first = first_of.setdefault(paths[row], row)
        if first == row:
            continue
        repeats.append(first)
        different = [column for column, of_rows in values.items() if of_rows[row] != of_rows[first]]
        hint = ""
        both = labels.of_rows[first], labels.of_rows[row]
        if is_joined:
            labels.of_rows[first] = tuple(dict.fromkeys(both[0] + both[1]))
        elif {*both[0]} != {*both[1]}:
            different = [labels.column]
            hint = "if images have several labels, pass --data.labels several"
        if not different:
            continue
        for one, other in ((first, row), (row, first)):
            text = f"{shown(paths[one])} has another {different[0]} in line {table.lines[other]}"
            faults.setdefault(one, table.fault(one, different[0], text, hint))
    kept = [row for row in first_of.values() if row not in faults]
    return kept, [*faults.values()], sum(first not in faults for first in repeats)


def listed_images(
    path: Path, named: Mapping[str, Sequence[str]]
) -> tuple[list[str], list[str] | None]:
    """Return the paths in a table whose labels do not matter, and their groups if it has a column of groups.

    Args:
        path: The table.
        named: Column names by role. A column is found by its usual names if the table has none of its names here.

    Raises:
        ValueError: The table has no column of paths, or a row without a path or a group.
    """
    table = read_table(path)
    own = {
        role: named[role]
        for role in ("path", "group")
        if role in named and set(named[role]) <= set(table.columns)
    }
    found = find_columns(table, own, needs_labels=False)
    columns = Columns(found.path, (), group=found.group)
    paths, faults = _read_paths(table, columns.path, folder_of(table, columns.path))
    values, of_values = _read_values(table, columns)
    if faults := faults + of_values:
        raise ValueError(faults[0].advice())
    return paths, _groups(table, columns, values)[1] if columns.group else None


def _groups(
    table: TableFile, columns: Columns, values: Mapping[str, np.ndarray]
) -> tuple[list[int], list[str]]:
    """Return the id and the name of the group of each row; none without a column of groups."""
    if columns.group is None:
        return [], []
    return values[columns.group].tolist(), [*map(_label_text, table.columns[columns.group])]


# Paths


def folder_of(table: TableFile, column: str) -> str:
    """Return the folder that relative paths in a table are relative to: that of the table, or the working directory.

    It is the working directory if the first files are there, and none is in the folder of the table. An example is the
    predictions.csv of a run.
    """
    folder = str(table.path.parent)
    texts = [_label_text(value) for value in table.columns[column][:_NUM_TRIED]]
    first = [text for text in texts if text and not _fault_of_path(text)]
    if any(_exists(os.path.join(folder, text)) for text in first):
        return folder
    return "." if any(map(_exists, first)) else folder


def _exists(path: str) -> bool:
    return kind_of(path) not in (None, "link")


def _read_paths(table: TableFile, column: str, root: str) -> tuple[list[str], list[Fault]]:
    """Return the path of each image, and the rows that have none.

    Relative paths are joined to `root`, and absolute ones below it begin as these do, so that two rows of one image
    have the same path. An address must be inside of that of `root`: an untrusted table cannot name another server.
    """
    prefix = "" if root == "." else os.path.join(root, "")
    inside = {os.path.join(os.path.abspath(root), "")}
    if os.path.isabs(root) or is_in_bucket(root):
        inside.add(f"{root}/")  # of a relative one, it may be a folder of the same name inside
    paths: list[str] = []
    faults: list[Fault] = []
    for row, value in enumerate(table.columns[column]):
        text = value.strip() if isinstance(value, str) else _label_text(value)
        for start in inside:
            text = text.removeprefix(start)
        if fault := _fault_of_path(text):
            faults.append(table.fault(row, column, fault))
            text = ""
        path = text if text[:1] == "/" else prefix + text
        if "./" in text or "//" in text or text.endswith("/.."):
            inner = prefix + os.path.normpath(text)
            path = inner if is_in_bucket(root) else os.path.normpath(path)
        paths.append(path)
    return paths, faults


def unlistable(names: Sequence[str]) -> list[int]:
    """Return the indices of relative paths that a table of labels cannot have.

    Read from it, they are not UTF-8, differ, for example without a space at the beginning, or are that of another one.
    """
    table = TableFile(Path(), {"path": [*names]}, [*range(len(names))])
    paths, _ = _read_paths(table, "path", ".")
    first_of: dict[str, int] = {}
    return [
        i
        for i, (name, path) in enumerate(zip(names, paths, strict=True))
        if path != name.encode("utf-8", "replace").decode()
        or first_of.setdefault(_label_text(name), i) != i
    ]


def _fault_of_path(text: str) -> str:
    """Return why a text is not the path of an image; "" if it is one."""
    if not text:
        return "the path is empty"
    if "://" in text and _URL.match(text):
        return (
            "the path is an address outside of the folder of the images; write paths that are "
            "relative to their folder, and pass that as --data.root, or to predict in place of the table"
        )
    try:
        is_path = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        is_path = False
    return "" if is_path else f"'{shown(text)}' is not a path"


def _missing_files(
    table: TableFile, column: str, paths: Sequence[str], stats: FileStats, root: str
) -> list[Fault]:
    """Return the faults of the rows whose file does not exist."""
    faults: list[Fault] = []
    for row in np.flatnonzero(~stats.is_regular).tolist():
        what = "is not a file" if stats.sizes[row] >= 0 else "does not exist"
        hint = f"relative paths are relative to {root} (--data.root)"
        if "\\" in paths[row]:
            hint = "write paths with / instead of \\"
        text = f"{shown(paths[row])} {what}"
        faults.append(table.fault(row, column, text, hint))
    return faults


# Labels


def read_labels(
    table: TableFile,
    columns: Columns,
    kind: LabelsOfTable,
    separator: str | None,
) -> Labels:
    """Return the labels of each row.

    Args:
        table: The table.
        columns: Its columns, with labels.
        kind: Whether an image has one label or several; `auto` decides by the table.
        separator: The character between the labels of an image; None finds it.

    Raises:
        ValueError: The separator is ambiguous.
    """
    if columns.has_indicators:
        return _read_indicators(table, columns.labels, kind)
    column = columns.labels[0]
    has_lists = any(isinstance(value, list) for value in table.columns[column])
    mark = None if kind == "single" or has_lists else _separator(table, column, separator)
    if kind == "auto":
        kind = "single" if mark is None and not has_lists else "several"
    how = "one label per image" if kind == "single" else "several labels per image"
    if mark:
        how += f", labels separated by {mark!r}"
    elif has_lists:
        how += ", lists of labels"
    is_single = kind == "single"
    sets, index, faults = table.read_column(column, lambda cell: _labels_in(cell, mark, is_single))
    of_rows = [sets[k] or () for k in index.tolist()]
    return Labels(kind, of_rows, f"{how} in column {column!r}", column, faults)


def _labels_in(cell: Any, mark: str | None, is_single: bool) -> tuple[str, ...]:
    """Return the labels in a cell, each once, in their order.

    Raises:
        ValueError: There is none, and `is_single`; or one cannot be a class.
    """
    parts = cell if isinstance(cell, list) and not is_single else [cell]
    # the text of a list would be a class of its own
    if any(_LIST.fullmatch(str(part).strip()) for part in parts):
        advice = "write labels with ; between them, or as a list of texts in a .jsonl table"
        raise ValueError(f"'{shown(cell)}' is a list, not a label; {advice}")
    if isinstance(cell, str) and mark is not None:
        parts = cell.split(mark)
    labels = tuple(dict.fromkeys(text for part in parts if (text := _label_text(part))))
    if is_single and not labels:
        raise ValueError("the label is empty")
    for label in labels:
        if why := why_name_is_invalid(label):
            raise ValueError(f"the label '{shown(label)}' {why}")
    return labels


def _separator(table: TableFile, column: str, requested: str | None) -> str | None:
    """Return the character between the labels of an image; None if there is none.

    Raises:
        ValueError: There are two.
        WrongUsage: The requested one is not a character.
    """
    if requested is not None:
        if len(requested) != 1:
            raise WrongUsage(f"{_SEPARATOR_OPTION} must be one character, not {requested!r}")
        return requested
    found: dict[str, int] = {}  # the first row with each separator
    for row, value in enumerate(table.columns[column]):
        for mark in _SEPARATORS:
            if isinstance(value, str) and mark in value:
                found.setdefault(mark, row)
    if len(found) > 1:
        first, second = found
        text = f"{table.where(found[second], column)}: labels contain both {first!r} and {second!r}"
        raise ValueError(f"{text}; say which one separates them: {_SEPARATOR_OPTION} '{first}'")
    return next(iter(found), None)


def _label_text(value: Any) -> str:
    """Return a label as text in composed Unicode, without spaces around it; "" if it is missing."""
    if value is None or value != value:  # not a number
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # pandas stores whole numbers as floats if some are missing
    return composed(str(value).strip())


def _read_indicators(table: TableFile, names: Sequence[str], kind: LabelsOfTable) -> Labels:
    """Return the labels from columns with 0 and 1. With `auto`, rows that all have exactly one 1 have one label."""
    faults: list[Fault] = []
    of_rows: list[tuple[str, ...]] = [()] * len(table)
    for name in names:
        values, index, of_column = table.read_column(name, _parse_indicator)
        faults += of_column
        is_true = np.array([value is True for value in values])
        for row in np.flatnonzero(is_true[index]).tolist():
            of_rows[row] += (_label_text(name),)
    if kind == "auto":
        kind = "single" if all(len(labels) == 1 for labels in of_rows) else "several"
    if kind == "single":
        faults += [
            table.fault(row, names[0], f"{len(labels)} columns are 1, one must be")
            for row, labels in enumerate(of_rows)
            if len(labels) != 1
        ]
    number = "several labels" if kind == "several" else "one label"
    how = f"{number} per image, in {len(names)} columns of 0 and 1"
    return Labels(kind, of_rows, how, names[0], faults)


def _parse_indicator(cell: Any) -> bool:
    text = str(cell).strip().lower()
    if text not in TRUTH:
        raise ValueError(f"'{shown(cell)}' is not 0 or 1")
    return TRUTH[text]


# Splits, groups and weights


def _read_values(table: TableFile, columns: Columns) -> tuple[dict[str, np.ndarray], list[Fault]]:
    """Return by column the index into `SPLITS`, the group or the weight of each row, (N,), and the faulty rows."""
    values: dict[str, np.ndarray] = {}
    faults: list[Fault] = []
    parsers: dict[str, Callable[[str], Any]] = {"group": _parse_group, "weight": _parse_weight}
    if columns.split:
        split_of = split_of_values(columns.split)
        parsers["split"] = lambda text: _parse_split(text, split_of)
    for role, parse in parsers.items():
        column = getattr(columns, role)
        if column is None:
            continue

        def parse_cell(cell: Any, parse: Callable[[str], Any] = parse, role: str = role) -> Any:
            text = _label_text(cell)
            if not text:
                raise ValueError(f"the {role} is empty")
            return parse(text)

        parsed, index, of_column = table.read_column(column, parse_cell, _HINTS[role])
        faults += of_column
        if role == "group":
            values[column] = group_ids(name or "" for name in parsed)[index]
        else:
            values[column] = np.array([value or 0 for value in parsed])[index]
    return values, faults


def _parse_split(text: str, split_of: Mapping[str, str]) -> int:
    if text.lower() not in split_of:
        raise ValueError(f"'{shown(text)}' is not a split")
    return SPLITS.index(split_of[text.lower()])


def _parse_group(text: str) -> str:
    if why := why_name_is_invalid(text):
        raise ValueError(f"the group {why}")
    return text


def _parse_weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = -1.0
    if weight != 0 and not _MIN_WEIGHT <= weight <= _MAX_WEIGHT:
        raise ValueError(f"'{shown(text)}' is not a weight")
    return weight


def _remark(columns: Columns, labels: Labels, num_repeated: int) -> str:
    """Return which columns are used, for a log line."""
    parts = [f"path in column {columns.path!r}", labels.how]
    for what in ("weight", "group", "split"):
        if column := getattr(columns, what):
            parts.append(f"{what} in column {column!r}")
    if num_repeated:
        repeat = counted(num_repeated, "row repeats", "rows repeat")
        parts.append(f"{repeat} another one: each image counts once")
    return ", ".join(parts)


def _by_name(names: Sequence[str]) -> list[int]:
    """Return the indices of names in the order in which `walk.find_images` lists them: by their parts, composed."""
    if all(map(str.isascii, names)):
        # the same, but much faster: no part of a path has a zero byte
        keys: list[Any] = [name.replace("/", "\0") for name in names]
    else:
        keys = [tuple((composed(part), part) for part in name.split("/")) for name in names]
    return sorted(range(len(names)), key=keys.__getitem__)
