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
from finetune.system.messages import reason

if TYPE_CHECKING:  # a command line is checked without it
    import numpy as np

T = TypeVar("T")
Content = tuple[dict[str, list[Any]], list[int]]  # columns and lines, see `TableFile`

SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
_DELIMITERS = (",", ";", "\t", "|")
# Limits of .parquet files, whose encodings store millions of equal values in a few bytes.
_MAX_VALUES = 10**7  # of a column
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
        import numpy as np

        values: list[T | None] = []
        errors: dict[int, str] = {}
        number_of: dict[str | tuple[type, str], int] = {}
        numbers = array("q")
        for cell in self.columns[column]:
            key = cell if isinstance(cell, str) else (type(cell), str(cell))
            number = number_of.setdefault(key, len(values))
            if number == len(values):
                try:
                    values.append(parse(cell))
                except ValueError as error:
                    errors[number] = str(error)
                    values.append(None)
            numbers.append(number)
        index = np.frombuffer(numbers, np.int64)
        rows = np.flatnonzero(np.isin(index, [*errors])).tolist()
        return values, index, [self.fault(row, column, errors[index[row]], hint) for row in rows]


def is_table(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is that of a table: it has the suffix of one, and is not a folder."""
    return os.path.splitext(path)[1].lower() in SUFFIXES and not os.path.isdir(path)


def read_table(path: Path) -> TableFile:
    """Read a table.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It is not a table, or has no rows. The message has the file and the line.
    """
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"the table {str(path)!r} {what}; pass another one")
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        columns, lines = _read_parquet(path)
    else:
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: save the table as UTF-8") from error
        columns, lines = (_read_jsonl if suffix == ".jsonl" else _read_csv)(path, text)
    if not lines:
        raise ValueError(f"{path}: there are no rows below the header")
    return TableFile(path, columns, lines)


def _read_csv(path: Path, text: str) -> Content:
    rows = _csv_rows(path, text)
    line, header = next(rows, (1, []))
    if not header:
        raise ValueError(f"{path} is empty: the first line must name the columns")
    names = Counter(name.strip() for name in header)
    if twice := [name for name, num in names.items() if num > 1 and name]:
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
    columns = {name.strip(): column for name, column in zip(header, values, strict=True)}
    columns.pop("", None)  # the numbers of the rows, as pandas writes them
    return columns, lines


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the fields of each row that is not empty. The first one is the header.

    Raises:
        ValueError: A quote is not closed, or the file is not CSV.
    """
    delimiter = "\t"
    if path.suffix.lower() != ".tsv":  # the most frequent one in the header, outside of quotes
        header = "".join(text.lstrip("\r\n").splitlines()[:1])
        delimiter = max(_DELIMITERS, key="".join(header.split('"')[::2]).count)
    file = io.StringIO(text, newline="")
    reader = csv.reader(file, delimiter=delimiter, strict=True, skipinitialspace=True)
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


def _read_jsonl(path: Path, text: str) -> Content:
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
    return {name: [record.get(name) for record in records] for name in names}, lines


def _read_parquet(path: Path) -> Content:
    import pyarrow
    import pyarrow.parquet

    try:
        # equal texts of a batch are stored once, so that their size is known before they are unpacked
        schema = pyarrow.parquet.read_metadata(path).schema
        texts = [schema.column(k).path for k in range(len(schema))]
        with pyarrow.parquet.ParquetFile(path, read_dictionary=texts) as file:
            return _content_of(path, file)
    except (pyarrow.ArrowException, KeyError, OSError) as error:
        raise ValueError(f"{path}: not a valid .parquet file ({reason(error)})") from error


def _content_of(path: Path, file: Any) -> Content:
    metadata = file.metadata
    num_values = sum(
        metadata.row_group(group).column(k).num_values
        for group in range(metadata.num_row_groups)
        for k in range(metadata.num_columns)
    )
    if num_values > _MAX_VALUES * metadata.num_columns:
        raise ValueError(
            f"{path} has {num_values:,} values; at most {_MAX_VALUES:,} in a column are read"
        )
    # columns may hold complete images, which are not needed
    columns: dict[str, list[Any]] = {
        field.name: []
        for field in file.schema_arrow
        if not any(kind in str(field.type) for kind in ("binary", "struct", "map"))
    }
    num_bytes = 0
    for batch in file.iter_batches(batch_size=_BATCH, columns=[*columns]):
        num_bytes += sum(map(_unpacked_size, batch.columns))
        if num_bytes > _MAX_BYTES:
            raise ValueError(
                f"{path} has texts of more than {_MAX_BYTES:,} bytes: write shorter ones"
            )
        for name, values in columns.items():
            column = batch.column(name)
            # Python's times have no nanoseconds
            is_time = str(column.type).startswith("timestamp")
            values += (column.cast("string") if is_time else column).to_pylist()
    return columns, list(range(1, metadata.num_rows + 1))


def _unpacked_size(column: Any) -> int:
    """Return the size of a column of a batch, in bytes, in which each text counts as often as it occurs."""
    import pyarrow.compute

    while pyarrow.types.is_nested(column.type):
        column = column.flatten()
    if not pyarrow.types.is_dictionary(column.type):
        return int(column.nbytes)
    sizes = pyarrow.compute.binary_length(column.dictionary)
    return pyarrow.compute.sum(sizes.take(column.indices)).as_py() or 0
