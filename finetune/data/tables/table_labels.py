"""The labels of each row of a table: one class or several, and how they are written."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from finetune.data.faults import Fault
from finetune.data.tables.table_columns import FALSE, TRUE, Columns
from finetune.data.tables.table_file import TableFile
from finetune.settings.schema import LabelKind
from finetune.system.file_names import composed
from finetune.system.messages import WrongUsage, shown, why_name_is_invalid

# Separators that are found automatically. Others are too frequent in names.
_SEPARATORS = (";", "|")
_SETTING = "data.label_separator"
# Those of combined class names, for a warning: the first that fits.
_COMBINING = (",", "+", "/", "&", " ")
# Lists and objects, as pandas, NumPy, JSON and databases write them.
_LIST = re.compile(r"\[.*\]|\{.*\}|\(\s*['\"].*\)", re.DOTALL)


@dataclass(frozen=True)
class Labels:
    """The labels of the rows of a table, N.

    Attributes:
        kind: Whether an image has one label or several.
        sets: The labels of rows: exactly one, or any number; () for faulty rows.
        set_of: The index into `sets` of each row, (N,) int64.
        how: How they are written, for a log line.
        column: Name of the column, for error messages.
    """

    kind: LabelKind
    sets: list[tuple[str, ...]]
    set_of: np.ndarray
    how: str
    column: str


def read_labels(
    table: TableFile,
    columns: Columns,
    kind: Literal["auto", "single", "several"],
    separator: str | None,
) -> tuple[Labels, list[Fault]]:
    """Return the labels of each row, and the rows whose labels are faulty.

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
    values = table.columns[column]
    has_lists = any(isinstance(value, (list, tuple)) for value in values)
    mark = None if kind == "single" or has_lists else _separator(table, values, separator)
    if kind == "auto":
        kind = "single" if mark is None and not has_lists else "several"
    how = "one label per image" if kind == "single" else "several labels per image"
    if mark:
        how += f", labels separated by {mark!r}"
    elif has_lists:
        how += ", lists of labels"
    sets, set_of, faults = table.read_column(
        column, lambda value: _labels_in(value, mark, is_single=kind == "single")
    )
    return Labels(kind, [labels or () for labels in sets], set_of, how, column), faults


def _labels_in(value: Any, mark: str | None, is_single: bool) -> tuple[str, ...]:
    """Return the labels in a value, each once, in their order.

    Raises:
        ValueError: There is none, and `is_single`; or one cannot be a class.
    """
    parts = value if isinstance(value, (list, tuple)) and not is_single else [value]
    # the text of a list would be a class of its own
    if any(_LIST.fullmatch(str(part).strip()) for part in parts):
        advice = "write labels with ; between them, or as a list of texts in a .jsonl table"
        raise ValueError(f"'{shown(value)}' is a list, not a label; {advice}")
    if isinstance(value, str) and mark is not None:
        parts = value.split(mark)
    labels = tuple(dict.fromkeys(text for part in parts if (text := label_text(part))))
    if is_single and not labels:
        raise ValueError("the label is empty")
    for label in labels:
        if why := why_name_is_invalid(label):
            raise ValueError(f"the label '{shown(label)}' {why}")
    return labels


def combining_mark(names: Sequence[str]) -> str:
    """Return the character by which most class names are combinations of labels of other classes; "" if none is."""
    for mark in _COMBINING:
        parts = [[part.strip() for part in name.split(mark)] for name in names]
        num_of = Counter(part for of_name in parts for part in set(of_name))
        combined = [len(of) > 1 and all(num_of[part] > 1 for part in of) for of in parts]
        if names and 2 * sum(combined) >= len(names):
            return mark
    return ""


def _separator(table: TableFile, values: Sequence[Any], requested: str | None) -> str | None:
    """Return the character between the labels of an image; None if there is none.

    Raises:
        ValueError: There are two.
        WrongUsage: The requested one is not a character.
    """
    if requested is not None:
        if len(requested) != 1:
            raise WrongUsage(f"--{_SETTING} must be one character, not {requested!r}")
        return requested
    texts = [value if isinstance(value, str) else "" for value in values]
    matches = [mark for mark in _SEPARATORS if any(mark in text for text in texts)]
    if len(matches) > 1:
        row = next(row for row, text in enumerate(texts) if matches[1] in text)
        text = f"{table.path}, line {table.lines[row]}: labels contain both {matches[0]!r} and {matches[1]!r}"
        raise ValueError(f"{text}; say which one separates them: --{_SETTING} '{matches[0]}'")
    return matches[0] if matches else None


def label_text(value: Any) -> str:
    """Return a label as text in composed Unicode, without spaces around it; "" if it is missing."""
    if isinstance(value, str):
        return composed(value.strip())
    if value is None or value != value:  # not a number
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # pandas stores whole numbers as floats if some are missing
    return composed(str(value).strip())


def _read_indicators(
    table: TableFile, names: Sequence[str], kind: Literal["auto", "single", "several"]
) -> tuple[Labels, list[Fault]]:
    """Return the labels from columns with 0 and 1. With `auto`, rows that all have exactly one 1 have one label."""
    faults: list[Fault] = []
    chosen: list[tuple[str, ...]] = [()] * len(table)
    for name in names:
        values, index, of_column = table.read_column(name, _indicator)
        faults += of_column
        label = (label_text(name),)
        for row in np.flatnonzero(np.array([value is True for value in values])[index]).tolist():
            chosen[row] += label
    if kind == "auto":
        kind = "single" if all(len(labels) == 1 for labels in chosen) else "several"
    column = names[0]
    if kind == "single":
        faults += [
            table.fault(row, column, f"{len(labels)} columns are 1, one must be")
            for row, labels in enumerate(chosen)
            if len(labels) != 1
        ]
    number = "several labels" if kind == "several" else "one label"
    how = f"{number} per image, in {len(names)} columns of 0 and 1"
    number_of = {labels: k for k, labels in enumerate(dict.fromkeys(chosen))}
    set_of = np.array([number_of[labels] for labels in chosen], np.int64)
    return Labels(kind, [*number_of], set_of, how, column), faults


def _indicator(value: Any) -> bool:
    text = str(value).strip().lower()
    if text not in (*TRUE, *FALSE):
        raise ValueError(f"'{shown(value)}' is not 0 or 1")
    return text in TRUE
