"""The labels of each row of a table: one class or several, and how they are written."""

import re
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from finetune.data.faults import Fault
from finetune.data.tables.table_columns import FALSE, TRUE, Columns
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
        sets: The different labels of rows: exactly one, or any number.
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
    faults = _list_faults(table, values, column, kind)
    if kind == "single":
        texts, set_of = distinct(values)
        sets: list[tuple[str, ...]] = [(text,) if text else () for text in texts]
        is_empty = np.array([not text for text in texts], bool)
        for row in np.flatnonzero(is_empty[set_of]).tolist():
            faults.append(table.fault(row, column, "the label is empty"))
        return Labels("single", sets, set_of, "one label per image", column), faults
    how = "several labels per image"
    if mark:
        how += f", labels separated by {mark!r}"
    elif has_lists:
        how += ", lists of labels"
    sets, set_of = distinct(values, lambda value: _split(value, mark))
    return Labels("several", sets, set_of, how, column), faults


def distinct(
    values: Sequence[Any], parse: Callable[[Any], Hashable] | None = None
) -> tuple[list[Any], np.ndarray]:
    """Return the different parsed values of a column, by default as text, and the index of that of each row, (N,).

    Each different text is parsed once.
    """
    parse = parse or label_text
    number: dict[Hashable, int] = {}
    number_of_text: dict[str, int] = {}
    numbers = array("q")
    for value in values:
        k = number_of_text.get(value) if isinstance(value, str) else None
        if k is None:
            k = number.setdefault(parse(value), len(number))
            if isinstance(value, str):
                number_of_text[value] = k
        numbers.append(k)
    return list(number), np.frombuffer(numbers, np.int64)


def _list_faults(
    table: TableFile, values: Sequence[Any], column: str, kind: LabelKind
) -> list[Fault]:
    """Return the rows where a label is the text of a list or an object: it would be a class of its own."""

    def holds_list(value: Any) -> bool:
        parts = value if kind == "several" and isinstance(value, (list, tuple)) else [value]
        return any(_LIST.fullmatch(str(part).strip()) for part in parts)

    hint = "write labels with ; between them, or as a list of texts in a .jsonl table"
    is_list, index = distinct(values, holds_list)
    return [
        table.fault(row, column, f"'{shown(values[row])}' is a list, not a label", hint)
        for row in np.flatnonzero(np.array(is_list, bool)[index]).tolist()
    ]


def combining_mark(names: Sequence[str]) -> str:
    """Return the character by which most class names are combinations of labels of other classes; "" if none is."""
    for mark in _COMBINING:
        parts = [[part.strip() for part in name.split(mark)] for name in names]
        num_of = Counter(part for of_name in parts for part in set(of_name))
        combined = [len(of) > 1 and all(num_of[part] > 1 for part in of) for of in parts]
        if 2 * sum(combined) >= len(names):
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


def _split(value: Any, mark: str | None) -> tuple[str, ...]:
    """Return the labels in a value, each once, in their order."""
    if isinstance(value, (list, tuple)):
        parts = list(value)
    elif isinstance(value, str) and mark is not None:
        parts = value.split(mark)
    else:
        parts = [value]
    return tuple(dict.fromkeys(text for part in parts if (text := label_text(part))))


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
    chosen: list[list[str]] = [[] for _ in table.lines]
    for name in names:
        label = label_text(name)
        for row, value in enumerate(table.columns[name]):
            text = str(value).strip().lower()
            if text in TRUE:
                chosen[row].append(label)
            elif text not in FALSE:
                faults.append(table.fault(row, name, f"'{shown(value)}' is not 0 or 1"))
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
    sets, set_of = distinct(chosen, tuple)
    return Labels(kind, sets, set_of, how, column), faults
