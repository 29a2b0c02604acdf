"""How a table file is read, and the one line about a file that is no table."""

import csv
import json
import resource
import time
from pathlib import Path

import numpy as np
import pytest

from finetune.data.tables.table_file import is_table, read_table
from finetune.system.messages import WrongUsage

HEADER = "path,label"


def write(path, content, encoding="utf-8"):
    path.write_bytes(content if isinstance(content, bytes) else content.encode(encoding))
    return path


@pytest.mark.parametrize(
    "content",
    [
        "path,label\na b.jpg,é\nc.jpg,dog\n",
        "path,label\r\na b.jpg,é\r\nc.jpg,dog",
        "path,label\ra b.jpg,é\rc.jpg,dog\r",
        "\ufeffpath,label\na b.jpg,é\nc.jpg,dog\n",
        'path,label\n"a b.jpg","é"\n"c.jpg", "dog"\n',
        "path;label\na b.jpg;é\nc.jpg;dog\n",
        "path\tlabel\na b.jpg\té\nc.jpg\tdog\n",
        ",path,label\n0,a b.jpg,é\n1,c.jpg,dog\n",  # as pandas writes the numbers of its rows
    ],
    ids=["LF", "CRLF", "CR", "BOM", "quotes", "semicolons", "tabs", "row numbers"],
)
def test_all_spellings_of_csv_are_the_same_table(tmp_path, content):
    table = read_table(write(tmp_path / "x.csv", content))
    assert table.columns == {"path": ["a b.jpg", "c.jpg"], "label": ["é", "dog"]}
    assert table.lines == [2, 3]


def test_lines_are_those_of_the_file_whatever_is_quoted_or_empty(tmp_path):
    content = 'path,label\n\n"a\nb.jpg",x\n,\nc.jpg,"y, z"\n'
    table = read_table(write(tmp_path / "x.csv", content))
    assert table.columns == {"path": ["a\nb.jpg", "c.jpg"], "label": ["x", "y, z"]}
    assert table.lines == [3, 6]


def test_json_lines_keep_their_types_and_lack_what_they_lack(tmp_path):
    rows = [{"path": "a.jpg", "label": ["x", "y"]}, {"path": "b.jpg", "label": 3, "split": "val"}]
    text = json.dumps(rows[0]) + "\n\n" + json.dumps(rows[1])
    table = read_table(write(tmp_path / "x.jsonl", text))
    assert table.columns == {
        "path": ["a.jpg", "b.jpg"],
        "label": [["x", "y"], 3],
        "split": [None, "val"],
    }
    assert table.lines == [1, 3]


def test_parquet_is_read_without_its_binary_columns(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    content = {"path": ["a.jpg", "b.jpg"], "label": ["x", None], "image": [b"1", b"2"]}
    parquet.write_table(pyarrow.table(content), tmp_path / "x.parquet")
    table = read_table(tmp_path / "x.parquet")
    assert table.columns == {"path": ["a.jpg", "b.jpg"], "label": ["x", None]}
    assert table.lines == [1, 2]
    write(tmp_path / "y.parquet", b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"y\.parquet: not a valid \.parquet file"):
        read_table(tmp_path / "y.parquet")


@pytest.mark.parametrize(
    ("num", "labels", "message"),
    [
        (1_000_000, 1, r"x\.parquet has 1,000,000 rows in [\d,]+ bytes: most of them are equal"),
        (1_000_000, 25, r"x\.parquet has 26,000,000 values in [\d,]+ bytes; at most 10,000,000"),
    ],
)
def test_parquet_that_unpacks_to_far_more_is_refused_by_its_footer(tmp_path, num, labels, message):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * num), ["a.jpg"])
    ends = np.arange(num + 1, dtype=np.int32) * labels
    label = pyarrow.ListArray.from_arrays(ends, pyarrow.nulls(labels * num, pyarrow.string()))
    parquet.write_table(pyarrow.table({"path": path, "label": label}), tmp_path / "x.parquet")
    began = time.process_time()
    with pytest.raises(ValueError, match=message):
        read_table(tmp_path / "x.parquet")
    assert time.process_time() - began < 1


@pytest.mark.parametrize("has_lists", [False, True])
def test_parquet_whose_long_texts_repeat_is_refused_before_they_are_unpacked(tmp_path, has_lists):
    """A text of 10 MB in a file of 30 kB, 10,000 times."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    num = 10_000
    label = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * num), ["x" * 10_000_000])
    if has_lists:
        label = pyarrow.ListArray.from_arrays(np.arange(num + 1, dtype=np.int32), label)
    names = [f"{i}.jpg" for i in range(num)]
    parquet.write_table(pyarrow.table({"path": names, "label": label}), tmp_path / "x.parquet")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, limits[1]))
    try:
        with pytest.raises(
            ValueError, match=r"x\.parquet has texts of more than 1,073,741,824 bytes"
        ):
            read_table(tmp_path / "x.parquet")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"sep=;\npath;label\na.jpg;x\n", r"x\.csv, line 1: .* remove 'sep=;'"),
        ("x.csv", b"path,label\na.jpg,caf\xe9\n", r"x\.csv is not UTF-8: save the table as UTF-8"),
        ("x.csv", b"", r"x\.csv is empty"),
        ("x.csv", b"path,label\n", r"x\.csv: there are no rows"),
        ("x.csv", b"path,label\na.jpg,x\nb,c.jpg,x\n", r"x\.csv, line 3: 3 fields, but the header has 2"),
        ("x.csv", b"path,label\na.jpg,x\nb.jpg\n", r"x\.csv, line 3: 1 fields"),
        ("x.csv", b'path,label\na.jpg,x\n"b.jpg,x\nc.jpg,y\n', r"x\.csv, line 3: not valid CSV"),
        ("x.csv", b"path,label,path\na.jpg,x,b\n", r"line 1: the column 'path' occurs twice"),
        ("x.jsonl", b'{"path": "a"}\n{"path": \n', r"x\.jsonl, line 2: not valid JSON"),
        ("x.jsonl", b'{"path": "a"}\n["b"]\n', r"x\.jsonl, line 2: a JSON object is needed"),
        ("x.jsonl", b"[" * 100_000, r"x\.jsonl, line 1: not valid JSON"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_table_is_one_line_that_says_where(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_table(write(tmp_path / name, content))
    assert "\n" not in str(caught.value)


def test_other_files_are_refused_by_their_names(tmp_path):
    assert is_table("a/LABELS.CSV") and not is_table("a/labels.txt")
    with pytest.raises(WrongUsage, match=r"\.xlsx tables are unsupported; save it as one of \.csv"):
        read_table(write(tmp_path / "x.xlsx", b"PK"))
    with pytest.raises(FileNotFoundError, match=r"nowhere\.csv' does not exist"):
        read_table(tmp_path / "nowhere.csv")


def test_a_folder_is_no_table_whatever_its_name(tmp_path):
    assert is_table(tmp_path / "images.csv")
    (tmp_path / "images.csv").mkdir()
    assert not is_table(tmp_path / "images.csv")
    with pytest.raises(FileNotFoundError, match=r"images\.csv' is not a file"):
        read_table(tmp_path / "images.csv")


def test_many_rows_are_read_fast(tmp_path):
    with open(tmp_path / "x.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(
            [HEADER.split(","), *([f"c{i % 7}/{i}.jpg", f"c{i % 7}"] for i in range(100_000))]
        )
    began = time.process_time()
    assert len(read_table(tmp_path / "x.csv")) == 100_000
    assert time.process_time() - began < 2
