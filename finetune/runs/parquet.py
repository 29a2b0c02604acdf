"""Predictions as a .parquet file, where pyarrow is installed."""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.system.messages import WrongUsage, install


def check_pyarrow() -> Any:
    """Return what writes such files.

    Raises:
        WrongUsage: It is not installed.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise WrongUsage(f"a .parquet file needs pyarrow: {install('parquet')}") from error
    return pyarrow


def write_parquet(target: Path, parts: Sequence[Path], columns: Sequence[str]) -> None:
    """Write the rows of `parts`, one as JSON on each line, in pieces that need little memory.

    Args:
        target: The file.
        parts: Where the rows are, in order.
        columns: Their keys; what is not a path, an error or a class is a number.
    """
    pyarrow = check_pyarrow()
    is_text = {name: name in ("path", "error") or name.startswith("class") for name in columns}
    schema = pyarrow.schema(
        [(name, pyarrow.string() if text else pyarrow.float64()) for name, text in is_text.items()]
    )
    with pyarrow.parquet.ParquetWriter(target, schema) as writer:
        for part in parts:
            with open(part, encoding="utf-8") as lines:
                while rows := [json.loads(line) for line in islice(lines, 10_000)]:
                    writer.write_table(pyarrow.Table.from_pylist(rows, schema))
