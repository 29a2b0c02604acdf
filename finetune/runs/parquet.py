"""Predictions in a .parquet file. This needs pyarrow."""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.system.messages import WrongUsage, install


def check_pyarrow() -> Any:
    """Return the module `pyarrow`.

    Raises:
        WrongUsage: It is not installed.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise WrongUsage(f"a .parquet file needs pyarrow: {install('parquet')}") from error
    return pyarrow


def write_parquet(target: Path, parts: Sequence[Path], columns: Sequence[str]) -> None:
    """Write the rows of JSON Lines files to a .parquet file, in chunks that need little memory.

    Args:
        target: The .parquet file.
        parts: The JSON Lines files, in order.
        columns: Keys of the rows. Paths, errors and classes are text, labels are lists of text, all others are numbers.
    """
    pyarrow = check_pyarrow()

    def kind(name: str) -> Any:
        if name in ("labels", "predicted"):
            return pyarrow.list_(pyarrow.string())
        is_text = name in ("path", "error") or name.startswith("class")
        return pyarrow.string() if is_text else pyarrow.float64()

    schema = pyarrow.schema([(name, kind(name)) for name in columns])
    with pyarrow.parquet.ParquetWriter(target, schema) as writer:
        for part in parts:
            with open(part, encoding="utf-8") as lines:
                while rows := [json.loads(line) for line in islice(lines, 10_000)]:
                    writer.write_table(pyarrow.Table.from_pylist(rows, schema))
