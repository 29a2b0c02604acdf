"""Reads a table file into columns. Nothing in it is executed, and no address in it is opened.

Text is UTF-8, with or without a byte order mark. Lines may end in LF, CRLF or CR.
"""

import csv
import io
import json
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from finetune.data.faults import Fault
from finetune.system.messages import WrongUsage, install, reason

if TYPE_CHECKING:  # a command line is checked without it
    import numpy as np

T = TypeVar("T")

SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
# Kinds of tables that are recognised only to say what to do.
_UNSUPPORTED = (".json", ".xls", ".xlsx", ".ods", ".feather", ".arrow")
_DELIMITERS = (",", ";", "\t", "|")
# Limits of .parquet files, whose encodings store millions of equal values in a few bytes.
_MAX_VALUES = 10**7
_MAX_BYTES = 2**30
_BATCH = 8192  # rows of a .parquet file that are read at a time


@dataclass(frozen=True)
class TableFile:
    """The content of a table file, N rows.

    Attributes:
        path: The file.
        columns: The values of each column by its name, N each, in the order of the file. A missing value is None.
        lines: The line of the file where each row begins, from 1; for .parquet the number of the row.
    """

    path: Path
    columns: dict[str, list[Any]]
    lines: list[int]

    def __len__(self) -> int:
        return len(self.lines)

    def where(self, row: int, column: str) -> str:
        """Return the place of a value, for a message."""
        unit = "row" if self.path.suffix.lower() == ".parquet" else "line"
        return f"{self.path}, {unit} {self.lines[row]}, column {column}"

    def fault(self, row: int, column: str, text: str, hint: str = "") -> Fault:
        """Return a fault in a row and a column. Rows with faults can be skipped."""
        return Fault(self.where(row, column), text, hint, can_skip=True, row=row)

    def read_column(
        self, column: str, parse: Callable[[Any], T], hint: str = ""
    ) -> tuple[list[T | None], "np.ndarray", list[Fault]]:
        """Parse the values of a column, each different one once.

        Args:
            column: The column.
            parse: Returns the value of a cell. It raises a ValueError that says what is wrong with it.
            hint: What to do about that.

        Returns:
            The different values, None for faulty ones; the index into them of each row, (N,) int64; the faulty rows.
        """
        values: list[T | None] = []
        errors: dict[int, str] = {}
        number_of: dict[str | tuple[type, str], int] = {}
        numbers = array("q")
        for cell in self.columns[column]:
            key = cell if isinstance(cell, str) else (type(cell), str(cell))
            number = number_of.get(key)
            if number is None:
                number = number_of[key] = len(values)
                try:
                    values.append(parse(cell))
                except ValueError as error:
                    errors[number] = str(error)
                    values.append(None)
            numbers.append(number)
        import numpy as np

        index = np.frombuffer(numbers, np.int64)
        rows = np.flatnonzero(np.isin(index, [*errors])).tolist()
        return values, index, [self.fault(row, column, errors[index[row]], hint) for row in rows]


def is_table(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is that of a table: it has the suffix of one, and is not a folder."""
    return _has_suffix(path) and not os.path.isdir(path)


def _has_suffix(path: str | os.PathLike[str]) -> bool:
    return os.path.splitext(path)[1].lower() in SUFFIXES


def check_supported(path: str | os.PathLike[str]) -> None:
    """Refuse the suffixes of tables that are not supported.

    Raises:
        WrongUsage: It has one.
    """
    suffix = os.path.splitext(path)[1].lower()
    if suffix in _UNSUPPORTED:
        raise WrongUsage(
            f"{str(path)!r}: {suffix} tables are unsupported; save it as one of {' '.join(SUFFIXES)}"
        )


def read_table(path: str | os.PathLike[str]) -> TableFile:
    """Read a table.

    Raises:
        FileNotFoundError: The file does not exist.
        WrongUsage: Its suffix is unsupported.
        ValueError: It is not a table, or has no rows. The message has the file and the line.
    """
    path = Path(path)
    check_supported(path)
    if not _has_suffix(path):
        raise WrongUsage(f"{str(path)!r}: a table has one of the suffixes {' '.join(SUFFIXES)}")
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"the table {str(path)!r} {what}; pass another one")
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        table = _read_parquet(path)
    else:
        text = _decode(path, path.read_bytes())
        table = _read_jsonl(path, text) if suffix == ".jsonl" else _read_csv(path, text)
    if not len(table):
        raise ValueError(f"{path}: there are no rows below the header")
    return table


def _decode(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: save the table as UTF-8") from error


def _read_csv(path: Path, text: str) -> TableFile:
    if text[:4].lower() == "sep=":
        raise ValueError(
            f"{path}, line 1: the first line must name the columns: remove {text[:5]!r}"
        )
    delimiter = "\t" if path.suffix.lower() == ".tsv" else _delimiter(text)
    rows = _csv_rows(path, text, delimiter)
    line, header = next(rows, (1, []))
    if not header:
        raise ValueError(f"{path} is empty: the first line must name the columns")
    header = [name.strip() for name in header]
    twice = [name for name, num in Counter(header).items() if num > 1 and name]
    if twice:
        raise ValueError(f"{path}, line {line}: the column {twice[0]!r} occurs twice")
    values: list[list[str]] = [[] for _ in header]
    lines: list[int] = []
    for line, record in rows:
        if len(record) != len(header):
            raise ValueError(
                f"{path}, line {line}: {len(record)} fields, but the header has {len(header)}; "
                "put values that contain the separator in double quotes"
            )
        for column, value in zip(values, record, strict=True):
            column.append(value)
        lines.append(line)
    columns = {name: column for name, column in zip(header, values, strict=True) if name}
    return TableFile(path, columns, lines)


def _delimiter(text: str) -> str:
    """Return the separator of the columns: the most frequent one in the header, outside of quotes."""
    header = text.lstrip("\r\n").splitlines()[:1]
    outside = "".join("".join(header).split('"')[::2])
    return max(_DELIMITERS, key=outside.count)


def _csv_rows(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the fields of each row that is not empty.

    Raises:
        ValueError: A quote is not closed, or the file is not CSV.
    """
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=delimiter, strict=True, skipinitialspace=True
    )
    line = 1
    try:
        for record in reader:
            if any(record):
                yield line, record
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {line}: not valid CSV ({error}); a quote may not be closed"
        ) from error


def _read_jsonl(path: Path, text: str) -> TableFile:
    records: list[dict[str, Any]] = []
    lines: list[int] = []
    for line, row in enumerate(io.StringIO(text, newline=None), 1):
        if not row.strip():
            continue
        try:
            record = json.loads(row)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {line}: not valid JSON ({reason(error)})") from error
        if not isinstance(record, dict):
            raise ValueError(
                f"{path}, line {line}: a JSON object is needed, such as "
                '{"path": "a.jpg", "label": "cat"}'
            )
        records.append(record)
        lines.append(line)
    names = dict.fromkeys(name for record in records for name in record)
    columns = {name: [record.get(name) for record in records] for name in names}
    return TableFile(path, columns, lines)


def _read_parquet(path: Path) -> TableFile:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise WrongUsage(f"{path}: a .parquet table needs pyarrow: {install('parquet')}") from error
    try:
        # Columns may hold complete images, which are not needed.
        fields = pyarrow.parquet.read_schema(path)
        columns: dict[str, list[Any]] = {
            field.name: [] for field in fields if _is_needed(field.type)
        }
        metadata = pyarrow.parquet.read_metadata(path)
        num_columns = metadata.num_columns
        chunks = [
            metadata.row_group(group).column(k)
            for group in range(metadata.num_row_groups)
            for k in range(num_columns)
        ]
        num_values = sum(chunk.num_values for chunk in chunks)
        if num_values > _MAX_VALUES * num_columns:
            raise ValueError(
                f"{path} has {num_values:,} values; at most {_MAX_VALUES:,} in a column are read"
            )
        texts = [metadata.schema.column(k).path for k in range(num_columns)]
        num_bytes = 0
        # equal texts of a batch are stored once, so that their size is known before they are unpacked
        with pyarrow.parquet.ParquetFile(path, read_dictionary=texts) as file:
            for batch in file.iter_batches(batch_size=_BATCH, columns=[*columns]):
                num_bytes += sum(map(_unpacked_size, batch.columns))
                if num_bytes > _MAX_BYTES:
                    raise ValueError(
                        f"{path} has texts of more than {_MAX_BYTES:,} bytes: write shorter ones"
                    )
                for name, values in columns.items():
                    values += _values(batch.column(name))
    except (pyarrow.ArrowException, KeyError, OSError) as error:
        raise ValueError(f"{path}: not a valid .parquet file ({reason(error)})") from error
    return TableFile(path, columns, list(range(1, metadata.num_rows + 1)))


def _is_needed(kind: Any) -> bool:
    """Return whether a column of this type has text, numbers or truth values, or lists of them."""
    from pyarrow import types

    while hasattr(kind, "value_type"):  # of a list or dictionary
        kind = kind.value_type
    skipped = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_nested)
    return not any(is_kind(kind) for is_kind in skipped)


def _values(column: Any) -> list[Any]:
    """Return the values of a column of a batch. Times in nanoseconds are texts, since Python's times have none."""
    import pyarrow

    if getattr(column.type, "unit", "") == "ns":
        column = column.cast(pyarrow.string())
    return list(column.to_pylist())


def _unpacked_size(column: Any) -> int:
    """Return the size of a column of a batch, in bytes, in which each text counts as often as it occurs."""
    import pyarrow.compute

    while pyarrow.types.is_nested(column.type):
        column = column.flatten()
    if not pyarrow.types.is_dictionary(column.type):
        return int(column.nbytes)
    sizes = pyarrow.compute.binary_length(column.dictionary)
    return pyarrow.compute.sum(sizes.take(column.indices)).as_py() or 0
