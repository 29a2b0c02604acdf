"""Which columns of a table are found by their names, and which must be named."""

from pathlib import Path

import pytest

from finetune.data.tables.table_columns import Columns, find_columns, parse_columns
from finetune.data.tables.table_file import TableFile
from finetune.system.messages import WrongUsage


def table(**columns):
    return TableFile(Path("x.csv"), columns, list(range(2, 2 + len(next(iter(columns.values()))))))


def named(*names):
    return table(**{name: ["a.jpg"] for name in names})


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("path", "label"), Columns("path", ("label",))),
        (("File_Name", "Species"), Columns("File_Name", ("Species",))),
        (("image path", "class", "split"), Columns("image path", ("class",), split="split")),
        (("img", "target", "weight", "group"), Columns("img", ("target",), None, "weight", "group")),
        # of predictions.csv and test_predictions.csv
        (("path", "class", "probability", "p_a", "error"), Columns("path", ("class",))),
        (
            ("path", "label", "class", "probability"),
            Columns("path", ("label",), others={"label": ("class",)}),
        ),
        (
            ("image", "path", "label", "split", "subset"),
            Columns("path", ("label",), "split", others={"path": ("image",), "split": ("subset",)}),
        ),
        (("path", "label", "Sample_Weight"), Columns("path", ("label",), weight="Sample_Weight")),
    ],
)  # fmt: skip
def test_columns_are_found_by_their_usual_names(names, expected):
    assert find_columns(named(*names), {}) == expected


def test_an_option_names_columns_of_other_names():
    columns = named("id", "name", "label", "when")
    text = parse_columns("path:name, label:when")
    assert text == parse_columns({"path": "name", "label": ["when"]})
    assert find_columns(columns, text) == Columns("name", ("when",))
    several = parse_columns({"label": ["a", "b"]})
    assert several == parse_columns("label:a,label:b")


def test_an_option_ignores_a_column():
    columns = named("path", "label", "weight", "kg")
    assert find_columns(columns, parse_columns("weight:kg")).weight == "kg"
    for option in ("weight:null", {"weight": None}, {"weight": "null"}):
        assert find_columns(columns, parse_columns(option)).weight is None
    with pytest.raises(WrongUsage, match="pass a column for label"):
        parse_columns({"label": None})


@pytest.mark.parametrize(
    ("names", "option", "message"),
    [
        (("a/1.jpg", "cat"), None, r"x\.csv, line 1: there is no header"),
        (("when", "label"), None, r"none of the columns 'when', 'label' is the path; name it with .* path:NAME"),
        (("path", "when"), None, r"none of the columns 'path', 'when' is the label; name it with .* label:NAME"),
        (("path", "species", "category"), None, r"'species' and 'category' may both be the label; .* label:species"),
        (("path", "label", "weight", "sample_weight"), None, r"may both be the weight; .* weight:weight"),
        (("path", "label", "group", "patient"), None, r"'group' and 'patient' may both be the group"),
        (("path", "label"), "path:paht", r"x\.csv has no column 'paht'; did you mean 'path'"),
        (("path", "label"), "lable:label", r"'lable' is not a role of a column; did you mean 'label'"),
        (("path", "label"), "path", r"pass a column for path"),
        (("path", "label"), "path:path,path:label", r"path can only be one column"),
        (("path", "label"), "label:label,group:label", r"names the column 'label' twice"),
        (("path", "label"), {5: "label"}, r"5 is not a role of a column; valid are"),
    ],
)  # fmt: skip
def test_what_is_missing_or_ambiguous_is_one_line(names, option, message):
    with pytest.raises(ValueError, match=message):
        find_columns(named(*names), parse_columns(option))


def test_columns_of_0_and_1_are_the_classes_where_there_is_no_label():
    rows = table(path=["a", "b"], cat=["0", "1"], dog=[1, 0], size=["10", "20"], weight=["1", "1"])
    columns = find_columns(rows, {})
    assert columns.labels == ("cat", "dog") and columns.has_indicators
    with pytest.raises(ValueError, match="is the label"):  # a single one may be anything
        find_columns(table(path=["a", "b"], cat=["0", "1"]), {})


def test_options_are_checked_before_any_table_is_read():
    with pytest.raises(WrongUsage):
        parse_columns("colour:red")
