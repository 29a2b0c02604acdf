"""Rows of JSON lines as a .parquet file."""

import json
import sys

import pyarrow.parquet
import pytest

from finetune.runs.folder import Run
from finetune.runs.parquet import write_parquet
from finetune.runs.predictions import PredictionWriter


def test_rows_of_all_parts_in_order_texts_as_texts_and_the_rest_as_numbers(tmp_path):
    columns = ["path", "class", "probability", "p_1", "error"]
    rows = [
        dict(zip(columns, (f"{i}", f"{i % 3}", i / 4, None, None), strict=True))
        for i in range(10_003)
    ]
    parts = [tmp_path / "a", tmp_path / "b"]
    for part, some in zip(parts, (rows[:10_001], rows[10_001:]), strict=True):
        part.write_text("".join(json.dumps(row) + "\n" for row in some))
    write_parquet(tmp_path / "out.parquet", parts, columns)
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert table.to_pylist() == rows
    assert [str(field.type) for field in table.schema] == [
        "string",
        "string",
        "double",
        "double",
        "string",
    ]
    assert pyarrow.parquet.ParquetFile(tmp_path / "out.parquet").num_row_groups == 3


def test_parquet_without_its_extra_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[parquet\]'"):
        PredictionWriter(Run(tmp_path, "predict"), "out.parquet")
