"""How a table file is read, which of its columns are used, and how its labels are written."""

import csv
import io
import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from finetune.data.tables.table_columns import Columns, find_columns, parse_columns
from finetune.data.tables.table_file import TableFile, is_table, read_table
from finetune.data.tables.table_rows import Labels, read_labels

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff"), max_size=9)
CELL = TEXT | st.text(" ,;|\t\"'\n\ré", max_size=5)
NAMES = ["path", "label", "other"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@given(
    st.lists(st.tuples(CELL, CELL, CELL).filter(any), min_size=1, max_size=5),
    st.sampled_from(",;\t|"),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.sampled_from(["", "\ufeff"]),
)
@example([("a b.jpg", "é", "")], ",", "\n", "")
def test_a_csv_file_is_read_as_the_csv_module_writes_it(folder, rows, delimiter, end, mark):
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=delimiter, lineterminator=end, quoting=csv.QUOTE_ALL)
    writer.writerow(NAMES)
    lines = []
    for row in rows:
        lines.append(1 + len(list(io.StringIO(file.getvalue(), newline=None))))
        writer.writerow(row)
    table = read_table(write(folder / "x.csv", mark + file.getvalue()))
    assert [*zip(*table.columns.values(), strict=True)] == rows
    assert [*table.columns] == NAMES
    assert table.lines == lines


def test_csv_without_quotes_with_row_numbers_and_empty_lines(tmp_path):
    content = ', path,label\n0,a b.jpg, "y, z"\n\n1,"c\nd.jpg",x\n,,\n2,e.jpg,x'
    table = read_table(write(tmp_path / "x.csv", content))
    assert table.columns == {"path": ["a b.jpg", "c\nd.jpg", "e.jpg"], "label": ["y, z", "x", "x"]}
    assert table.lines == [2, 4, 7]


JSON = st.none() | st.booleans() | st.integers() | TEXT | st.lists(TEXT, max_size=3)


@given(
    rows=st.lists(
        st.dictionaries(st.sampled_from(NAMES), JSON, min_size=1), min_size=1, max_size=5
    ),
    end=st.sampled_from(["\n", "\r", "\r\n"]),
)
def test_json_lines_are_read_as_the_json_module_writes_them(folder, rows, end):
    text = (2 * end).join(map(json.dumps, rows))
    table = read_table(write(folder / "x.jsonl", text.encode()))
    names = {name for row in rows for name in row}
    assert table.columns == {name: [row.get(name) for row in rows] for name in names}
    assert table.lines == [2 * i + 1 for i in range(len(rows))]


@given(st.sampled_from([".csv", ".tsv", ".jsonl", ".parquet"]), st.binary(max_size=60))
@example(".jsonl", b"[" * 100_000)
@example(".csv", b"path,label,path\na.jpg,x,b\n")
@example(".parquet", b"PAR1 and no more")
def test_any_bytes_are_a_table_or_one_line_about_the_file(folder, suffix, content):
    path = write(folder / f"x{suffix}", content)
    try:
        table = read_table(path)
    except ValueError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:
        assert all(len(values) == len(table) > 0 for values in table.columns.values())


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.csv", b"path,label\na.jpg,caf\xe9\n", "save the table as UTF-8"),
        ("x.csv", b"", "is empty"),
        ("x.csv", b"path,label\n", "no rows"),
        ("x.csv", b"path,label\na.jpg,x\nb,c.jpg,x\n", "line 3: 3 fields"),
        ("x.csv", b'path,label\na.jpg,x\n"b.jpg,x\nc.jpg,y\n', "line 3: not valid CSV"),
        ("x.csv", b"path,label,path\na.jpg,x,b\n", "line 1: .* 'path' occurs twice"),
        ("x.jsonl", b'{"path": "a"}\n{"path": \n', "line 2: not valid JSON"),
        ("x.jsonl", b'{"path": "a"}\n["b"]\n', "line 2: a JSON object"),
    ],
)
def test_a_file_that_is_no_table_is_one_line_that_says_where(tmp_path, name, content, words):
    with pytest.raises(ValueError, match=rf"{name}.*{words}"):
        read_table(write(tmp_path / name, content))


def test_a_folder_is_no_table_whatever_its_name(tmp_path):
    assert is_table(tmp_path / "IMAGES.CSV") and not is_table(tmp_path / "images.txt")
    (tmp_path / "IMAGES.CSV").mkdir()
    assert not is_table(tmp_path / "IMAGES.CSV")


# Parquet


def write_parquet(file: Path, /, **columns: Any) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), file)
    return file


def test_parquet_is_read_without_its_binary_columns(tmp_path):
    content = {"path": ["a.jpg", "b.jpg"], "label": ["x", None], "image": [b"1", b"2"]}
    table = read_table(write_parquet(tmp_path / "x.parquet", **content))
    assert table.columns == {"path": ["a.jpg", "b.jpg"], "label": ["x", None]}
    assert table.lines == [1, 2]


def test_parquet_may_have_times_in_nanoseconds(tmp_path):
    times = np.array(["2026-01-01", "2026-01-01T00:00:00.000000001"], "datetime64[ns]")
    columns = read_table(write_parquet(tmp_path / "x.parquet", path=["a", "b"], t=times)).columns
    assert columns["path"] == ["a", "b"] and len(set(columns["t"])) == 2


@pytest.mark.parametrize(
    ("num", "label", "num_labels", "words"),
    [
        (10**6, None, 25, "26,000,000 values"),
        (10_000, "x" * 10**7, 0, "texts of more than"),
        (10_000, "x" * 10**7, 1, "texts of more than"),
    ],
)
def test_parquet_that_unpacks_to_far_more_is_refused(tmp_path, num, label, num_labels, words):
    """Equal values and lists take some kilobytes; they are refused before they are unpacked."""
    pyarrow = pytest.importorskip("pyarrow")
    many = num * max(num_labels, 1)
    if label is None:
        labels = pyarrow.nulls(many, pyarrow.string())
    else:
        labels = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * many), [label])
    if num_labels:
        ends = np.arange(num + 1, dtype=np.int32) * num_labels
        labels = pyarrow.ListArray.from_arrays(ends, labels)
    names = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * num), ["a.jpg"])
    table = write_parquet(tmp_path / "x.parquet", path=names, label=labels)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, limits[1]))
    try:
        with pytest.raises(ValueError, match=words):
            read_table(table)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


# Columns


def table_of(**columns: list[Any]) -> TableFile:
    return TableFile(Path("x.csv"), columns, list(range(2, 2 + len(next(iter(columns.values()))))))


def named(*names: str) -> TableFile:
    return table_of(**{name: ["a.jpg"] for name in names})


@pytest.mark.parametrize(
    ("names", "option", "expected"),
    [
        ("path label", None, Columns("path", ("label",))),
        ("File_Name Species", None, Columns("File_Name", ("Species",))),
        ("image-path class split", None, Columns("image-path", ("class",), split="split")),
        ("img target weight group", None, Columns("img", ("target",), None, "weight", "group")),
        # of predictions.csv and test_predictions.csv
        ("path class probability p_a error", None, Columns("path", ("class",))),
        ("path label class", None, Columns("path", ("label",))),
        ("path label Sample_Weight", None, Columns("path", ("label",), weight="Sample_Weight")),
        ("id name label when", "path:name, label:when", Columns("name", ("when",))),
        ("id name label when", {"path": "name", "label": ["when"]}, Columns("name", ("when",))),
        ("path a b", "label:a,label:b", Columns("path", ("a", "b"))),
        ("path label weight kg", "weight:kg", Columns("path", ("label",), weight="kg")),
        ("path label weight", "weight:null", Columns("path", ("label",))),
        ("path label weight", {"weight": None}, Columns("path", ("label",))),
        ("when label", None, "is the path.* path:NAME"),
        ("path when", None, "is the label.* label:NAME"),
        ("path species category", None, "'species' and 'category' .* label:species"),
        ("path label weight sample_weight", None, "both be the weight"),
        ("path label", "path", "a column for path"),
        ("path label", "path:path,path:label", "only be one column"),
        ("path label", "label:label,group:label", "'label' twice"),
        ("path label", {"label": None}, "a column for label"),
        ("path label", {5: "label"}, "5 is not a role"),
    ],
)
def test_columns_are_found_by_their_usual_names_or_named_by_data_columns(names, option, expected):
    table = named(*names.split())
    if isinstance(expected, Columns):
        assert find_columns(table, parse_columns(option)) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            find_columns(table, parse_columns(option))


SPLIT_VALUES = ["train", "Training", "val", "validation", "DEV", "test", "testing"]
FLAGS = ["is_valid", "isTest", "is-val", "Is Train", "val", "validation", "test"]


NAMED_BY_OTHERS = ["set", "phase", "stage", "fold", "data_split", "usage", "type", "dataset"]


@given(
    st.sampled_from(NAMED_BY_OTHERS) | TEXT.map("column {}".format),
    st.lists(st.sampled_from(SPLIT_VALUES), min_size=3, max_size=3),
)
def test_a_column_of_splits_is_the_split_whatever_its_name_is(name, values):
    table = table_of(path=["a", "b", "c"], label=["x"] * 3, **{name: values})
    assert find_columns(table, {}).split == name
    table.columns["phase" if name == "set" else "set"] = values
    with pytest.raises(ValueError, match="may both be the split"):
        find_columns(table, {})


@pytest.mark.parametrize("values", [["0", "1"], [True, False], ["1.0", "0.0"]])
@pytest.mark.parametrize("name", FLAGS)
def test_a_column_of_0_and_1_that_is_called_like_a_split_is_the_split(name, values):
    table = table_of(path=["a", "b"], **{name: values}, cat=["0", "1"], dog=[1, 0])
    columns = find_columns(table, {})
    assert columns.split == name and columns.labels == ("cat", "dog")


def test_columns_of_0_and_1_are_the_labels_where_there_is_no_label():
    table = table_of(path=["a", "b"], cat=["0", "1"], dog=[1, 0], size=["10", "20"])
    columns = find_columns(table, {})
    assert columns.labels == ("cat", "dog") and columns.has_indicators
    with pytest.raises(ValueError, match="is the label"):  # a single one may be anything
        find_columns(table_of(path=["a", "b"], cat=["0", "1"]), {})


# Labels


def labels_of(kind: str = "auto", separator: str | None = None, **columns: list[Any]) -> Labels:
    num = len(next(iter(columns.values())))
    table = table_of(path=[f"{i}.jpg" for i in range(num)], **columns)
    return read_labels(table, find_columns(table, {}), kind, separator)


def values_of(labels: Labels) -> list[tuple[str, ...]]:
    return labels.of_rows


@pytest.mark.parametrize(
    ("values", "options", "kind", "expected"),
    [
        (["cat", " dog "], {}, "single", [("cat",), ("dog",)]),
        (["cafe\u0301"], {}, "single", [("café",)]),
        (["cat;dog", "dog", ""], {}, "several", [("cat", "dog"), ("dog",), ()]),
        (["cat | dog", "dog|"], {}, "several", [("cat", "dog"), ("dog",)]),
        (["cat,dog", "dog"], {}, "single", [("cat,dog",), ("dog",)]),
        (["cat,dog", "dog"], {"separator": ","}, "several", [("cat", "dog"), ("dog",)]),
        (["hot dog", "cat"], {"separator": " "}, "several", [("hot", "dog"), ("cat",)]),
        (["a;b", "a|b"], {"separator": ";"}, "several", [("a", "b"), ("a|b",)]),
        (["a;b", "c"], {"kind": "single"}, "single", [("a;b",), ("c",)]),
        (["a", "c"], {"kind": "several"}, "several", [("a",), ("c",)]),
        ([["a", "b"], [], None], {}, "several", [("a", "b"), (), ()]),
        (["a;a;b"], {}, "several", [("a", "b")]),
        ([3, 3.0, "3"], {}, "single", [("3",)] * 3),
    ],
)
def test_labels_are_read_however_they_are_written(values, options, kind, expected):
    labels = labels_of(label=values, **options)
    assert labels.kind == kind and values_of(labels) == expected and labels.faults == []


def test_two_separators_are_ambiguous():
    with pytest.raises(ValueError, match="line 3, .*label_separator"):
        labels_of(label=["a;b", "a|b"])


def test_columns_of_0_and_1_are_several_labels_unless_each_row_has_one():
    several = labels_of(cat=["0", "1", "1"], dog=["0", "1.0", "0"])
    assert several.kind == "several" and values_of(several) == [(), ("cat", "dog"), ("cat",)]
    assert several.faults == []
    single = labels_of(cat=["0", "1"], dog=["1", "0"])
    assert single.kind == "single" and values_of(single) == [("dog",), ("cat",)]
    assert labels_of("several", cat=["0", "1"], dog=["1", "0"]).kind == "several"
    faults = labels_of("single", cat=["0", "1"], dog=["0", "1"]).faults
    assert [fault.row for fault in faults] == [0, 1]


@pytest.mark.parametrize(
    "cell",
    ["['cat', 'dog']", "[0 1 1]", "{cat,dog}", "[]", "('cat', 'dog')", ["cat", ["dog"]], {"c": 1}],
)
def test_a_list_that_was_written_as_text_is_no_label(cell):
    for options in ({}, {"kind": "several", "separator": ","}):
        faults = labels_of(label=["cat", "dog", cell], **options).faults
        assert [fault.row for fault in faults] == [2]
