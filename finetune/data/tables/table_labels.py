"""The labels of each row of a table: one class or several, and how they are written."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from finetune.data.tables.row_faults import Fault
from finetune.data.tables.table_columns import Columns
from finetune.data.tables.table_file import TableFile
from finetune.models.heads import LabelKind
from finetune.system.file_names import composed
from finetune.system.messages import WrongUsage, shown

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
        values: The labels of each row, N: exactly one, or any number.
        how: How they are written, for a log line.
        column: Name of the column, for error messages.
    """

    kind: LabelKind
    values: list[tuple[str, ...]]
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
    listed = _list_faults(table, values, column, kind)
    if kind == "single":
        labels = _labels_of(values, lambda value: (text,) if (text := label_text(value)) else ())
        empty = [
            Fault(i, table.lines[i], column, "the label is empty")
            for i, value in enumerate(labels)
            if not value
        ]
        return Labels("single", labels, "one label per image", column), listed + empty
    how = "several labels per image"
    if mark:
        how += f", labels separated by {mark!r}"
    elif has_lists:
        how += ", lists of labels"
    return Labels("several", _labels_of(values, _splitter(mark)), how, column), listed


def _list_faults(
    table: TableFile, values: Sequence[Any], column: str, kind: LabelKind
) -> list[Fault]:
    """Return the rows where a label is the text of a list or an object: it would be a class of its own."""
    faults: list[Fault] = []
    for i, value in enumerate(values):
        is_list = kind == "several" and isinstance(value, (list, tuple))
        parts = value if is_list else [value]
        if any(_LIST.fullmatch(str(part).strip()) for part in parts):
            fault = f"'{shown(value)}' is a list, not a label"
            hint = "write labels with ; between them, or as a list of texts in a .jsonl table"
            faults.append(Fault(i, table.lines[i], column, fault, hint))
    return faults


def combining_mark(names: Sequence[str]) -> str:
    """Return the character by which most class names are combinations of labels of other classes; "" if none is."""
    for mark in _COMBINING:
        parts = [[part.strip() for part in name.split(mark)] for name in names]
        num_of = Counter(part for of_name in parts for part in set(of_name))
        combined = [len(of) > 1 and all(num_of[part] > 1 for part in of) for of in parts]
        if 2 * sum(combined) >= len(names):
            return mark
    return ""


def _labels_of(
    values: Sequence[Any], parse: Callable[[Any], tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """Return the labels of each value. Each distinct text is parsed once."""
    known: dict[str, tuple[str, ...]] = {}
    labels: list[tuple[str, ...]] = []
    for value in values:
        if not isinstance(value, str):
            labels.append(parse(value))
            continue
        if value not in known:
            known[value] = parse(value)
        labels.append(known[value])
    return labels


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
    texts = [value for value in values if isinstance(value, str)]
    found = [mark for mark in _SEPARATORS if any(mark in text for text in texts)]
    if len(found) > 1:
        line = next(
            line
            for line, value in zip(table.lines, values, strict=True)
            if isinstance(value, str) and found[1] in value
        )
        text = f"{table.path}, line {line}: labels contain both {found[0]!r} and {found[1]!r}"
        raise ValueError(f"{text}; say which one separates them: --{_SETTING} '{found[0]}'")
    return found[0] if found else None


def _splitter(mark: str | None) -> Callable[[Any], tuple[str, ...]]:
    """Return the function from a value to its labels, each once, in their order."""

    def split(value: Any) -> tuple[str, ...]:
        if isinstance(value, (list, tuple)):
            parts = list(value)
        elif isinstance(value, str) and mark is not None:
            parts = value.split(mark)
        else:
            parts = [value]
        return tuple(dict.fromkeys(text for part in parts if (text := label_text(part))))

    return split


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
    """Return the labels from columns with 0 and 1. Without `kind`, rows that all have exactly one 1 have one label."""
    faults: list[Fault] = []
    chosen: list[list[str]] = [[] for _ in table.lines]
    for name in names:
        label = label_text(name)
        for i, value in enumerate(table.columns[name]):
            text = str(value).strip().lower()
            if text in ("1", "1.0", "true"):
                chosen[i].append(label)
            elif text not in ("0", "0.0", "false"):
                fault = f"'{shown(value)}' is not 0 or 1"
                faults.append(Fault(i, table.lines[i], name, fault))
    if kind == "auto":
        kind = "single" if all(len(labels) == 1 for labels in chosen) else "several"
    values = [tuple(labels) for labels in chosen]
    column = names[0]
    if kind == "single":
        faults += [
            Fault(i, table.lines[i], column, f"{len(labels)} columns are 1, one must be")
            for i, labels in enumerate(values)
            if len(labels) != 1
        ]
    number = "several labels" if kind == "several" else "one label"
    how = f"{number} per image, in {len(names)} columns of 0 and 1"
    return Labels(kind, values, how, column), faults
