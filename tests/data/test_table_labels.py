"""One label or several of each row, in every way to write them."""

from pathlib import Path

import pytest

from finetune.data.tables.table_columns import find_columns
from finetune.data.tables.table_file import TableFile
from finetune.data.tables.table_labels import label_text, read_labels
from finetune.system.messages import WrongUsage


def read(kind="auto", separator=None, **columns):
    num = len(next(iter(columns.values())))
    columns = {"path": [f"{i}.jpg" for i in range(num)], **columns}
    table = TableFile(Path("x.csv"), columns, list(range(2, 2 + num)))
    return read_labels(table, find_columns(table, {}), kind, separator)


@pytest.mark.parametrize(
    ("values", "options", "kind", "expected"),
    [
        (["cat", " dog "], {}, "single", [("cat",), ("dog",)]),
        (["cat;dog", "dog", ""], {}, "several", [("cat", "dog"), ("dog",), ()]),
        (["cat | dog", "dog|"], {}, "several", [("cat", "dog"), ("dog",)]),
        (["cat,dog", "dog"], {}, "single", [("cat,dog",), ("dog",)]),
        (["cat,dog", "dog"], {"separator": ","}, "several", [("cat", "dog"), ("dog",)]),
        (["hot dog", "cat"], {"separator": " "}, "several", [("hot", "dog"), ("cat",)]),
        (["a;b", "c"], {"kind": "single"}, "single", [("a;b",), ("c",)]),
        (["a", "c"], {"kind": "several"}, "several", [("a",), ("c",)]),
        ([["a", "b"], [], None], {}, "several", [("a", "b"), (), ()]),
        (["a;a;b"], {}, "several", [("a", "b")]),
        ([3, 3.0, "3"], {}, "single", [("3",)] * 3),
    ],
)  # fmt: skip
def test_the_table_says_whether_there_are_several(values, options, kind, expected):
    labels, faults = read(label=values, **options)
    assert labels.kind == kind and labels.values == expected and faults == []


def test_two_separators_are_ambiguous_until_one_is_stated():
    with pytest.raises(
        ValueError, match=r"x\.csv, line 3: .* both ';' and '\|'; .*label_separator"
    ):
        read(label=["a;b", "a|b"])
    assert read(label=["a;b", "a|b"], separator=";")[0].values == [("a", "b"), ("a|b",)]
    with pytest.raises(WrongUsage, match="must be one character, not ', '"):
        read(label=["a, b"], separator=", ")


def test_columns_of_0_and_1_are_several_labels_unless_each_row_has_one():
    several, faults = read(cat=["0", "1", "1"], dog=["0", "1.0", "0"])
    assert several.kind == "several" and several.values == [(), ("cat", "dog"), ("cat",)]
    assert faults == [] and several.how == "several labels per image, in 2 columns of 0 and 1"
    single, _ = read(cat=["0", "1"], dog=["1", "0"])
    assert single.kind == "single" and single.values == [("dog",), ("cat",)]
    assert read("several", cat=["0", "1"], dog=["1", "0"])[0].kind == "several"
    _, faults = read("single", cat=["0", "1"], dog=["0", "1"])
    assert [(fault.line, fault.text) for fault in faults] == [
        (2, "0 columns are 1, one must be"),
        (3, "2 columns are 1, one must be"),
    ]


def test_a_single_label_that_is_missing_is_a_fault_with_its_line():
    _, faults = read(label=["cat", "", None, float("nan"), " "])
    assert [(fault.line, fault.column) for fault in faults] == [(i, "label") for i in (3, 4, 5, 6)]
    _, faults = read("single", label=["cat", ["cat", "dog"]])
    assert [fault.text for fault in faults] == ["'['cat', 'dog']' is a list, not a label"]


def test_labels_are_in_composed_unicode():
    assert label_text("cafe\u0301") == "café" == label_text(" café ")
