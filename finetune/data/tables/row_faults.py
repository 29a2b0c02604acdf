"""Faults of the rows of a table: where they are, and what to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.system.messages import counted

_NUM_LOGGED = 3


@dataclass(frozen=True)
class Fault:
    """A fault of one row.

    Attributes:
        row: Index of the row.
        line: The line of the file, or the row of a .parquet file, from 1.
        column: Name of the column.
        text: What is wrong.
        hint: What to do about it.
    """

    row: int
    line: int
    column: str
    text: str
    hint: str = ""


def describe(path: Path, fault: Fault) -> str:
    """Return a fault in one line."""
    return f"{path}, {_place(path, fault)}"


def _place(path: Path, fault: Fault) -> str:
    unit = "row" if path.suffix.lower() == ".parquet" else "line"
    return f"{unit} {fault.line}, column {fault.column}: {fault.text}"


def error_line(path: Path, faults: Sequence[Fault]) -> str:
    """Return the error message for a table with faults, of which there is at least one: the first, and their number."""
    first = min(faults, key=lambda fault: fault.row)
    num_others = len({fault.row for fault in faults}) - 1
    more = ""
    if num_others:
        more = f" ({counted(num_others, 'more row has a fault', 'more rows have faults')})"
    hints = [first.hint, "--data.on_bad_image skip skips such rows"]
    hint = "; ".join(filter(None, hints))
    return f"{describe(path, first)}{more}; {hint}"


def skipped_line(path: Path, faults: Sequence[Fault]) -> str:
    """Return the log line for rows that are skipped, of which there is at least one."""
    num = len({fault.row for fault in faults})
    examples = "; ".join(_place(path, fault) for fault in faults[:_NUM_LOGGED])
    more = "; …" if len(faults) > _NUM_LOGGED else ""
    return f"{path}: skipped {counted(num, 'row')}: {examples}{more}"
