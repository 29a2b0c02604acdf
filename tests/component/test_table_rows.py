"""A table as the images of a data module: the same data set as class folders, and one line for each faulty row."""

import csv
import json
import os
import random
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from data_files import read, small
from hypothesis import given
from hypothesis import strategies as st
from promise import control, promise

from finetune.data.datasets.image_folder import ImageFolderData
from finetune.data.datasets.scan import scan
from finetune.data.listing import ScanOptions
from finetune.data.splits import group_ids
from finetune.data.tables import table_rows
from finetune.data.targets import MultiHot

ALL_TRAIN = {"val_fraction": 0, "test_fraction": 0}


def of_table(path: Path, **options: object) -> ImageFolderData:
    plain = {"image_size": 24, "num_workers": 0, "min_crop": 0.08, "augmentations": None}
    return read(ImageFolderData(table=str(path), **{**plain, **options}))


def write(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        return path
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)
    return path


def make(root: Path, *names: str) -> Path:
    """Files that all differ: nothing here looks into an image."""
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x" * (i + 1))
    return root


def sound(root: Path) -> list[dict]:
    """Make six images of each of two classes, and return their rows."""
    names = [f"{name}{i}.jpg" for name in "ab" for i in range(6)]
    make(root, *names)
    return [{"path": name, "label": name[0]} for name in names]


def rows_of(folder: Path) -> list[dict]:
    """The rows of a table that lists a data set in class folders, with a split column if it has splits."""
    rows = []
    for split, samples in scan(str(folder)).splits.items():
        for path in samples.paths:
            parts = Path(path).relative_to(folder).parts
            row = {"path": path, "label": parts[0] if split == "all" else parts[1]}
            rows.append(row if split == "all" else {**row, "split": split})
    return rows


PARTS = ["1.jpg", "2.png", "10.jpg", "deep/3.jpg", "deep.er/4.jpg", "é.jpg", "Z.jpg", "a b.jpg"]
CLASSES = ["cat", "Dog", "café", "10", "9", "deep", "hot dog"]


@promise("table")
@given(
    st.sampled_from([[""], ["train/"], ["train/", "val/"], ["Train/", "test/"]]),
    st.sampled_from(["inside", "above", "far"]),
    st.sampled_from(["x.csv", "x.tsv", "x.jsonl"]),
    st.sampled_from([{}, {"merge": "cat,Dog:pet"}, {"exclude": "cat"}, {"group_by": r"^(\w+)/\w"}]),
    st.randoms(use_true_random=False),
)
def test_a_table_is_the_same_data_set_as_its_folders(splits, place, name, changes, rng):
    """Same classes, splits, order, names, fingerprint, whatever the order of the rows and the place of the table."""
    with tempfile.TemporaryDirectory() as temporary:
        classes = ["cat", "Dog", *rng.sample(CLASSES[2:], 2)]
        names = [
            f"{split}{each}/{part}"
            for split in splits
            for each in classes
            for part in rng.sample(PARTS, rng.randint(3, len(PARTS)))
        ]
        folder = make(Path(temporary, "deep/data"), *names)
        rows = rows_of(folder)
        rng.shuffle(rows)
        where = {"inside": folder, "above": Path(temporary), "far": Path(temporary, "elsewhere")}
        where[place].mkdir(exist_ok=True)
        if place != "far":
            rows = [{**row, "path": os.path.relpath(row["path"], folder)} for row in rows]
        # the names of images are their paths below the root
        options = changes if place == "inside" else {"root": str(folder), **changes}
        data = of_table(write(where[place] / name, rows), **options)
        expected = small(folder, **changes)
        assert data.class_names == expected.class_names and data.label_kind == "single"
        assert data.fingerprint == expected.fingerprint != ""
        assert data.splits.keys() == expected.splits.keys()
        for split, samples in data.splits.items():
            other = expected.splits[split]
            assert list(samples.names()) == list(other.names())
            assert [os.path.abspath(path) for path in samples.paths] == list(other.paths)
            assert samples.targets.labels.tolist() == other.targets.labels.tolist()
            assert samples.stats.sizes.tolist() == other.stats.sizes.tolist()
            assert samples.hashes().tolist() == other.hashes().tolist()


@control("table")
def test_control_a_wrong_label_is_another_data_set(tmp_path):
    folder = make(tmp_path / "data", *(f"{name}/{part}" for name in CLASSES for part in PARTS))
    rows = rows_of(folder)
    table = write(tmp_path / "x.csv", rows)
    data = of_table(table, root=str(folder))
    rows[0]["label"] = rows[-1]["label"]
    assert of_table(write(table, rows), root=str(folder)).fingerprint != data.fingerprint
    assert data.fingerprint == small(folder).fingerprint


# the faulty row, more columns with the values of all other rows, the line and the column that are named, and words
FAULTS = [
    ("nowhere.jpg,a", "", 3, "path", "nowhere.jpg does not exist"),
    ("sub,a", "", 3, "path", "sub is not a file"),
    ("sub\\x.jpg,a", "", 3, "path", "write paths with /"),
    (",a", "", 3, "path", "the path is empty"),
    ("s3://bucket/x.jpg,a", "", 3, "path", "outside of the folder"),
    ("http://host/x.jpg?y,a", "", 3, "path", "outside of the folder"),
    ("extra.jpg,", "", 3, "label", "the label is empty"),
    ("extra.jpg,a\x07", "", 3, "label", "control character"),
    ("extra.jpg,[a]", "", 3, "label", "is a list"),
    ("extra.jpg,a,somewhere", "split=train", 3, "split", "'somewhere' is not a split"),
    ("extra.jpg,a,", "split=train", 3, "split", "the split is empty"),
    ("extra.jpg,a,0", "is_train=1", 3, "is_train", "'0' is not a split"),
    ("extra.jpg,a,", "patient=x", 3, "patient", "the group is empty"),
    ("extra.jpg,a,", "weight=1", 3, "weight", "the weight is empty"),
    *(
        (f"extra.jpg,a,{text}", "weight=1", 3, "weight", f"'{text}' is not a weight")
        for text in ("-1", "nan", "inf", "1e10", "x")
    ),
    ("a0.jpg,b", "", 2, "label", "in line 3"),
    ("./a0.jpg,b", "", 2, "label", "--data.labels several"),
    ("a0.jpg,a,2", "weight=1", 2, "weight", "in line 3"),
    ("a0.jpg,a,test", "split=train", 2, "split", "in line 3"),
    ("a0.jpg,a,y", "patient=x", 2, "patient", "in line 3"),
]


def count_lines_from_0(monkeypatch: pytest.MonkeyPatch) -> None:
    read_table = table_rows.read_table

    def wrong(path: Path) -> object:
        table = read_table(path)
        table.lines[:] = [line - 1 for line in table.lines]
        return table

    monkeypatch.setattr(table_rows, "read_table", wrong)


@promise("faulty-rows", controls=[count_lines_from_0])
@pytest.mark.parametrize(("row", "more", "line", "column", "words"), FAULTS)
def test_a_faulty_row_is_one_line_and_can_be_skipped(
    tmp_path, caplog, monkeypatch, row, more, line, column, words
):
    name, _, value = more.partition("=")
    good = [",".join([*each.values(), value][: 2 + bool(more)]) for each in sound(tmp_path)]
    make(tmp_path, "extra.jpg", "sub/x.jpg")
    monkeypatch.chdir(tmp_path)
    header = ",".join(["path", "label", name][: 2 + bool(more)])
    Path("x.csv").write_text("\n".join([header, good[0], row, *good[1:]]), "utf-8")
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        of_table(Path("x.csv"))
    text = str(caught.value)
    assert text.startswith(f"x.csv, line {line}, column {column}: ") and "\n" not in text
    assert "--data.on_bad_image skip" in text
    caplog.set_level("INFO")
    data = of_table(Path("x.csv"), on_bad_image="skip", **ALL_TRAIN)
    is_twice = line == 2
    assert len(data.splits["train"]) == 12 - is_twice
    assert len(data.scanned.faults) == 1 + is_twice
    assert f"x.csv: skipped {1 + is_twice} fault" in caplog.text


def test_several_faults_are_counted_and_equal_rows_count_once(tmp_path):
    rows = sound(tmp_path)
    data = of_table(write(tmp_path / "x.csv", [*rows, *rows[:2]]), **ALL_TRAIN)
    assert len(data.splits["train"]) == 12 and "2 rows repeat another one" in data.scanned.remark
    other = {
        **rows[0],
        "label": "b",
    }  # it drops the two rows of this image: none of them repeats another
    data = scan(str(write(tmp_path / "x.csv", [*rows, rows[0], other])))
    assert len(data) == 11 and "repeat" not in data.remark
    faulty = [{"path": f"{name}.jpg", "label": "a"} for name in ("n1", "n2", "n3")]
    with pytest.raises(ValueError, match=r"n1\.jpg does not exist \(2 more"):
        of_table(write(tmp_path / "x.csv", [*rows, *faulty]))


def test_names_that_no_file_has_are_faults_and_no_crash(tmp_path):
    """JSON can hold halves of characters and zero bytes; a byte that is not UTF-8 is a name as any other."""
    make(tmp_path, os.fsdecode(b"caf\xe9.jpg"))
    rows = [{**row, "group": "g"} for row in sound(tmp_path)]
    rows.append({"path": "caf\udce9.jpg", "label": "a", "group": "h"})
    assert len(of_table(write(tmp_path / "x.jsonl", rows), **ALL_TRAIN).splits["train"]) == 13
    for change in (
        {"path": "\ud800.jpg"},
        {"path": "a\0"},
        {"label": "\ud800"},
        {"group": "\ud800"},
    ):
        with pytest.raises(ValueError, match=rf"line 1, column {next(iter(change))}: "):
            of_table(write(tmp_path / "x.jsonl", [{**rows[0], **change}, *rows[1:]]))


def test_paths_are_relative_to_the_root_the_table_or_the_working_directory(tmp_path, monkeypatch):
    rows = sound(tmp_path / "images")
    table = write(tmp_path / "x.csv", rows)
    with pytest.raises(ValueError, match=r"a0\.jpg does not exist .*--data\.root"):
        of_table(table)
    assert len(of_table(table, root=str(tmp_path / "images")).splits) == 3
    assert len(of_table(write(tmp_path / "images/x.csv", rows)).splits) == 3
    monkeypatch.chdir(tmp_path / "images")  # as those of predictions.csv
    assert len(of_table(table).splits) == 3


@pytest.mark.parametrize("root", [None, "images", "."])
def test_an_image_counts_once_by_its_relative_and_absolute_path(tmp_path, monkeypatch, root):
    rows = sound(tmp_path / "images")
    folder = tmp_path / ("" if root == "images" else "images")
    absolute = [{**row, "path": str(tmp_path / "images" / row["path"])} for row in rows]
    monkeypatch.chdir(folder)
    data = scan(str(write(Path("x.csv"), [*absolute[:6], *rows])), ScanOptions(root=root))
    assert [*data.names()] == [row["path"] for row in rows]
    assert "6 rows repeat another one" in data.remark


def test_classes_are_those_of_the_training_rows(tmp_path):
    rows = [{**row, "split": "train"} for row in sound(tmp_path)]
    rows[-1] |= {"split": "valid", "label": "c"}
    table = write(tmp_path / "x.csv", rows)
    with pytest.raises(ValueError, match="line 13, column label: 'c' is not"):
        of_table(table)
    data = of_table(table, exclude="c")
    assert data.class_names == ["a", "b"] and sum(map(len, data.splits.values())) == 11
    with pytest.raises(ValueError, match="only the class 'a'"):
        of_table(table, exclude=["b", "c"])
    test = write(tmp_path / "y.csv", [{**row, "split": "Test"} for row in sound(tmp_path)])
    with pytest.raises(ValueError, match="none of 'train'"):
        of_table(test)
    assert set(of_table(test, class_names=["b", "a"]).splits) == {"test"}


def test_groups_are_those_of_the_table(tmp_path):
    rows = [{**row, "patient": row["path"][1], "image": ""} for row in sound(tmp_path)]
    data = of_table(write(tmp_path / "x.csv", rows), **ALL_TRAIN)
    samples = data.splits["train"]
    expected = group_ids(Path(path).stem[1] for path in samples.paths)
    assert samples.groups.tolist() == expected.tolist()
    for words in ("column 'path'", "one label per image", "group in column 'patient'"):
        assert words in data.scanned.remark
    rows[0]["patient"] = "another"  # which a resumed run sees
    assert of_table(write(tmp_path / "x.csv", rows), **ALL_TRAIN).fingerprint != data.fingerprint


@pytest.mark.parametrize("options", [{}, {"num_folds": 3, "fold": 2}, {"group_by": r"(\d)"}])
def test_training_images_keep_their_weights_in_any_split(tmp_path, options):
    rows = [{**row, "weight": i / 4} for i, row in enumerate(sound(tmp_path))]
    random.Random(0).shuffle(rows)
    data = of_table(write(tmp_path / "x.csv", rows), **options)
    assert data.splits.keys() == {"train", "val", "test"}
    weight_of = {row["path"]: row["weight"] for row in rows}
    train = data.splits.pop("train")
    assert train.weights.tolist() == [weight_of[Path(path).name] for path in train.paths]
    data.use_all_images("test")
    # metrics count each image once
    assert all(part.weights is None for part in data.splits.values())


def test_several_labels_are_excluded_merged_and_listed(tmp_path):
    labels = ["cat ; dog", "", "bird", "dog", "bird;cat;dog", "dog;cat"]
    make(tmp_path, *(f"{i}.jpg" for i in range(6)))
    rows = [{"path": f"{i}.jpg", "label": text} for i, text in enumerate(labels)]
    table = write(tmp_path / "x.csv", rows)
    data = of_table(table, exclude="bird", **ALL_TRAIN)
    targets = data.splits["train"].targets
    assert data.label_kind == "several" and isinstance(targets, MultiHot)
    assert data.class_names == ["cat", "dog"]
    assert targets.labels.tolist() == [[1, 1], [0, 0], [0, 0], [0, 1], [1, 1], [1, 1]]
    data = of_table(table, merge="cat,dog:pet", **ALL_TRAIN)
    assert data.class_names == ["bird", "pet"]
    assert data.splits["train"].targets.counts().tolist() == [2, 4]
    found = scan(str(table))
    names = [found.set_names[k] for k in found.set_of]
    assert names == ["cat + dog", "no label", "bird", "dog", "bird + cat + dog", "cat + dog"]
    assert found.counts().tolist() == [[2, 3, 4]]


@pytest.mark.parametrize("seed", range(2))
def test_a_random_split_leaves_each_of_several_labels_a_training_image(tmp_path, seed):
    pairs = np.random.default_rng(seed).permutation(np.repeat(np.arange(40), 2)).reshape(40, 2)
    rows = [{"path": f"{i}.jpg", "label": f"{a};{b}"} for i, (a, b) in enumerate(pairs)]
    make(tmp_path, *(row["path"] for row in rows))
    data = of_table(write(tmp_path / "x.csv", rows), split_seed=seed)
    assert data.splits["train"].targets.counts().min() > 0 and len(data.splits["train"]) < 40


def test_labels_several_joins_the_rows_of_an_image(tmp_path):
    rows = [*sound(tmp_path), {"path": "a0.jpg", "label": "b"}]
    data = of_table(write(tmp_path / "x.csv", rows), labels="several", **ALL_TRAIN)
    assert data.splits["train"].targets.counts().tolist() == [6, 7]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("data_split", ("train", "test")),
        ("usage", ("Training", "Validation")),
        ("is_valid", ("False", "True")),
        ("IsTest", ("0.0", "1.0")),
    ],
)
@pytest.mark.parametrize("has_indicators", [False, True])
def test_a_split_column_of_another_name_is_used(tmp_path, column, values, has_indicators):
    rows = sound(tmp_path)
    for i, row in enumerate(rows):
        if has_indicators:
            row |= {"a": int(row["label"] == "a"), "b": i % 2}
            del row["label"]
        row[column] = values[i % 3 == 0]
    table = write(tmp_path / "x.csv", rows)
    data = of_table(table, val_fraction=0)
    other = "test" if "test" in str((column, values)).lower() else "val"
    assert {split: len(part) for split, part in data.splits.items()} == {"train": 8, other: 4}
    ignoring = of_table(table, columns="split:null", val_fraction=0.5)
    assert set(ignoring.splits) == {"train", "val", "test"}
    assert sorted(ignoring.class_names) == sorted(data.class_names) == ["a", "b"]


@pytest.mark.parametrize("column", ["train", "valid"])
def test_columns_of_0_and_1_that_are_called_like_a_split_may_be_labels(tmp_path, column):
    """A train is a vehicle, too."""
    rows = [
        {"path": row["path"], "car": i % 2, "bus": int(i % 3 > 0), column: int(i > 3)}
        for i, row in enumerate(sound(tmp_path))
    ]
    table = write(tmp_path / "x.csv", rows)
    assert set(of_table(table).class_names) == {"car", "bus", column}
    if column == "train":
        with pytest.raises(ValueError, match="'0' is not a split"):
            of_table(table, columns="split:train")
    else:
        data = of_table(table, columns="split:valid", val_fraction=0)
        assert [len(part) for part in data.splits.values()] == [4, 8]
        assert data.class_names == ["bus", "car"]


@pytest.mark.parametrize("has_a_test_image", [True, False])
def test_a_label_without_a_training_image_does_not_disappear(tmp_path, has_a_test_image):
    rows = [
        {"path": row["path"], "a": int(i < 6), "b": int(i > 4), "c": 0, "split": "train"}
        for i, row in enumerate(sound(tmp_path))
    ]
    rows[0] |= {"a": 0, "b": 0, "c": int(has_a_test_image), "split": "test"}
    table = write(tmp_path / "x.csv", rows)
    with pytest.raises(ValueError, match=r"'c'.*--data\.exclude c"):
        of_table(table)
    assert of_table(table, exclude="c").class_names == ["a", "b"]
    assert of_table(table, merge="b,c:d").class_names == ["a", "d"]
    for value in ("-1", "nan", ""):  # uncertain, or not labelled
        rows[4]["b"] = value
        with pytest.raises(ValueError, match=f"line 6, column b: '{value}'"):
            of_table(write(table, rows))


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_are_added_move_no_image_to_another_split(tmp_path, seed):
    """Not even a folder with the same file names, or one that changes how many images lie in class folders."""
    rng = random.Random(seed)
    rows = [
        {"path": f"one/{name}/{i}.jpg", "label": name if rng.random() < 0.6 else "dog"}
        for name in ("cat", "dog")
        for i in range(60)
    ]
    added = [{**row, "path": row["path"].replace("one", "two")} for row in rows]
    added += [{"path": f"one/{i}.jpg", "label": "cat"} for i in range(40)]
    make(tmp_path, *(row["path"] for row in rows + added))
    before, after = (
        {
            path: split
            for split, samples in of_table(write(tmp_path / "x.csv", some)).splits.items()
            for path in samples.paths
        }
        for some in (rows, rows + added)
    )
    assert {path: after[path] for path in before} == before
