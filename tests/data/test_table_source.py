"""A table as the source of a data module, compared with the same images in class folders."""

import csv
import json
import os
import random
import re
import time
from pathlib import Path

import numpy as np
import pytest
from data_files import read, small
from promise import control, promise

from finetune.data.datasets.fashion_mnist import FashionMNIST
from finetune.data.datasets.folders import scan
from finetune.data.datasets.image_folder import ImageFolderData
from finetune.data.datasets.table_source import TableSource
from finetune.data.file_entries import FileStats
from finetune.data.splits import group_ids
from finetune.data.tables.table_rows import TableOptions
from finetune.data.targets import MultiHot
from finetune.system.messages import WrongUsage

OPTIONS = {"image_size": 24, "num_workers": 0, "min_crop": 0.08, "augmentations": None}


def of_table(path: Path, **options) -> ImageFolderData:
    return read(ImageFolderData(table=str(path), **{**OPTIONS, **options}))


def rows_of(folder: Path) -> list[dict[str, str]]:
    """The rows of a table that lists a data set in class folders, with a split column if it has splits."""
    _, splits = scan(folder)
    rows = []
    for split, samples in splits.items():
        for path in samples.paths:
            parts = Path(path).relative_to(folder).parts
            row = {"path": path, "label": parts[0] if split == "all" else parts[1]}
            rows.append(row if split == "all" else {**row, "split": split})
    return rows


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


def names_of_many(rng: random.Random, splits: list[str]) -> list[str]:
    parts = ["1.jpg", "2.png", "10.jpg", "deep/3.jpg", "deep.er/4.jpg", "é.jpg", "Z.jpg", "a b.jpg"]
    classes = rng.sample(["cat", "Dog", "café", "10", "9", "deep", "hot dog"], 3)
    return [
        f"{split}{name}/{part}"
        for split in splits
        for name in classes
        for part in rng.sample(parts, rng.randint(3, len(parts)))
    ]


@promise("table")
@pytest.mark.parametrize("splits", [[""], ["train/"], ["train/", "val/"], ["Train/", "test/"]])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("place", ["inside", "above", "far"])
def test_a_table_is_the_same_data_set_as_its_folders(tmp_path, splits, seed, place):
    """Same classes, splits, order, names, fingerprint, whatever the order of the rows and the place of the table."""
    rng = random.Random(seed)
    folder = make(tmp_path / "deep/data", *names_of_many(rng, splits))
    rows = rows_of(folder)
    rng.shuffle(rows)
    # the names of images are their paths below the root
    options = {} if place == "inside" else {"root": str(folder)}
    where = {"inside": folder, "above": tmp_path, "far": tmp_path / "elsewhere"}[place]
    where.mkdir(exist_ok=True)
    if place != "far":
        rows = [{**row, "path": os.path.relpath(row["path"], folder)} for row in rows]
    data = of_table(write(where / rng.choice(["x.csv", "x.tsv", "x.jsonl"]), rows), **options)
    expected = small(folder)
    assert data.class_names == expected.class_names
    assert data.fingerprint == expected.fingerprint != ""
    assert data.splits.keys() == expected.splits.keys()
    assert data.label_kind == "single"
    for split, samples in data.splits.items():
        other = expected.splits[split]
        assert list(samples.names()) == list(other.names())
        assert [os.path.abspath(path) for path in samples.paths] == list(other.paths)
        assert samples.targets.labels.tolist() == other.targets.labels.tolist()
        assert samples.stats.sizes.tolist() == other.stats.sizes.tolist()
        assert samples.hashes().tolist() == other.hashes().tolist()


@control("table")
def test_control_a_wrong_label_is_another_data_set(tmp_path):
    folder = make(tmp_path / "data", *names_of_many(random.Random(0), [""]))
    rows = rows_of(folder)
    table = write(tmp_path / "x.csv", rows)
    data = of_table(table, root=str(folder))
    rows[0]["label"] = rows[-1]["label"]
    assert of_table(write(table, rows), root=str(folder)).fingerprint != data.fingerprint
    assert data.fingerprint == small(folder).fingerprint


def test_images_are_decoded_where_they_are(colours, tmp_path):
    table = write(tmp_path / "x.csv", rows_of(colours))
    data = of_table(table, root=str(colours), batch_size=16)
    expected = small(colours, batch_size=16)
    for mine, other in zip(data.val_dataloader(), expected.val_dataloader(), strict=True):
        assert mine["image"].equal(other["image"]) and mine["label"].equal(other["label"])


def sound(root: Path) -> list[dict[str, str]]:
    make(root, *(f"{name}{i}.jpg" for name in "ab" for i in range(6)))
    return [{"path": f"{name}{i}.jpg", "label": name} for name in "ab" for i in range(6)]


def lines(*faulty: str, header: str = "path,label") -> str:
    good = [
        f"{name}{i}.jpg,{name}{',train' * ('split' in header)}{',1' * ('weight' in header)}"
        for name in "ab"
        for i in range(6)
    ]
    return "\n".join([header, *good[:1], *faulty, *good[1:]]) + "\n"


@promise("faulty-rows")
@pytest.mark.parametrize(
    "case",
    [
        (["nowhere.jpg,a"], "path,label", (3, "path"), "nowhere.jpg does not exist"),
        (["sub,a"], "path,label", (3, "path"), "sub is not a file"),
        (["sub\\x.jpg,a"], "path,label", (3, "path"), "does not exist"),
        ([",a"], "path,label", (3, "path"), "the path is empty"),
        (["s3://bucket/x.jpg,a"], "path,label", (3, "path"), "is an address outside of the folder"),
        (["ftp://host/x.jpg,a"], "path,label", (3, "path"), "is an address, which is unsupported"),
        (["http://host/x.jpg?y,a"], "path,label", (3, "path"), "is an address, which is unsupported"),
        (["s3://a:b/c@bucket/x.jpg,a"], "path,label", (3, "path"), "s3://…@bucket/x.jpg' is an address"),
        (["http://host/x.jpg?a=b,a"], "path,label", (3, "path"), "http://host/x.jpg?…' is an address"),
        (["s3://a:b?c@bucket/x.jpg,a"], "path,label", (3, "path"), "'s3://…' is an address"),
        (["extra.jpg,"], "path,label", (3, "label"), "the label is empty"),
        (["extra.jpg,'a\x07'"], "path,label", (3, "label"), "control character"),
        (["extra.jpg,a,somewhere"], "path,label,split", (3, "split"), "'somewhere' is not a split"),
        (["extra.jpg,a,"], "path,label,split", (3, "split"), "the split is empty"),
        (["a0.jpg,b"], "path,label", (2, "label"), "'a' here and 'b' in line 3"),
        (["./a0.jpg,b"], "path,label", (2, "label"), "'a' here and 'b' in line 3"),
        *(
            ([f"extra.jpg,a,{weight}"], "path,label,weight", (3, "weight"), message)
            for weight, message in {
                "": "the weight is empty",
                **{text: f"'{text}' is not a weight" for text in ("-1", "nan", "inf", "1e10", "x")},
            }.items()
        ),
        (["a0.jpg,a,2"], "path,label,weight", (2, "weight"), "'1' here and '2' in line 3"),
        (["a0.jpg,a,test"], "path,label,split", (2, "split"), "'train' here and 'test' in line 3"),
    ],
)  # fmt: skip
def test_a_faulty_row_is_one_line_and_can_be_skipped(tmp_path, caplog, monkeypatch, case):
    faulty, header, where, message = case
    sound(tmp_path)
    make(tmp_path, "extra.jpg", "sub/x.jpg")
    monkeypatch.chdir(tmp_path)
    table = Path("x.csv")
    table.write_text(lines(*faulty, header=header), "utf-8")
    with pytest.raises(ValueError) as caught:
        of_table(table)
    text = str(caught.value)
    assert text.startswith(f"x.csv, line {where[0]}, column {where[1]}: ") and "\n" not in text
    assert message in text and text.endswith("--data.on_bad_image skip skips such rows")
    caplog.set_level("INFO")
    data = of_table(table, on_bad_image="skip", val_fraction=0, test_fraction=0)
    is_twice = "in line 3" in message
    assert len(data.splits["train"]) == 12 - is_twice
    assert (
        len(data.scanned.skipped_rows) == 1 + is_twice and message in data.scanned.skipped_rows[0]
    )
    assert f"x.csv: skipped {1 + is_twice} row" in caplog.text and message in caplog.text


def test_several_faults_are_counted_and_the_first_is_named(tmp_path):
    sound(tmp_path)
    (tmp_path / "x.csv").write_text(lines("n1.jpg,a", "n2.jpg,a", "a1.jpg,"), "utf-8")
    with pytest.raises(ValueError, match=r"line 3, .*n1\.jpg does not exist \(2 more rows have"):
        of_table(tmp_path / "x.csv")


def test_a_row_twice_counts_once(tmp_path, caplog):
    caplog.set_level("INFO")
    rows = sound(tmp_path)
    data = of_table(write(tmp_path / "x.csv", [*rows, *rows[:2]]), val_fraction=0, test_fraction=0)
    assert len(data.splits["train"]) == 12 and "2 rows repeat another one" in caplog.text


def test_paths_are_relative_to_the_root_if_there_is_one(tmp_path, monkeypatch):
    rows = sound(tmp_path / "images")
    table = write(tmp_path / "x.csv", rows)
    with pytest.raises(ValueError, match=r"a0\.jpg does not exist .*\(--data\.root\)"):
        of_table(table)
    assert len(of_table(table, root=str(tmp_path / "images")).splits) == 3
    # or to the working directory, as those of predictions.csv
    monkeypatch.chdir(tmp_path / "images")
    assert len(of_table(table).splits) == 3


def test_classes_are_those_of_the_training_rows(tmp_path):
    rows = [{**row, "split": "train"} for row in sound(tmp_path)]
    rows[-1] |= {"split": "valid", "label": "c"}
    with pytest.raises(
        ValueError, match=r"line 13, column label: 'c' is not in the training classes"
    ):
        of_table(write(tmp_path / "x.csv", rows))
    data = of_table(write(tmp_path / "x.csv", rows), exclude="c")
    assert (
        data.class_names == ["a", "b"] and len(data.splits["train"]) + len(data.splits["val"]) == 11
    )
    with pytest.raises(WrongUsage, match=r"--data\.exclude: there is no class 'd'"):
        of_table(tmp_path / "x.csv", exclude="d")
    with pytest.raises(ValueError, match="only the class 'a'"):
        of_table(tmp_path / "x.csv", exclude=["b", "c"])
    with pytest.raises(ValueError, match="rows of 'test' but none of 'train'"):
        of_table(write(tmp_path / "y.csv", [{**row, "split": "Test"} for row in sound(tmp_path)]))
    names = {"class_names": ["b", "a"]}
    assert set(of_table(tmp_path / "y.csv", **names).splits) == {"test"}
    with pytest.raises(ValueError, match=r"y\.csv has no rows of the split 'val'"):
        of_table(tmp_path / "y.csv", **names).loader("val")


def test_classes_are_merged_alike_in_tables_and_folders(tmp_path):
    names = [f"{name}/{i}.jpg" for name in ("cat", "dog", "lion", "wolf") for i in range(8)]
    folder = make(tmp_path / "data", *names)
    table = write(tmp_path / "x.csv", rows_of(folder))
    for merge, expected in (
        ("cat,lion:feline", ["dog", "feline", "wolf"]),
        (["lion:cat", "wolf:dog"], ["cat", "dog"]),
    ):
        data = of_table(table, merge=merge, root=str(folder))
        other = small(folder, merge=merge)
        assert data.class_names == other.class_names == expected
        assert data.fingerprint == other.fingerprint != small(folder).fingerprint
        for split, samples in data.splits.items():
            assert list(samples.names()) == list(other.splits[split].names())
    assert sum(len(part) for part in other.splits.values()) == 32
    for merge, message in (
        ("cat,tiger:x", "there is no class.* 'tiger'"),
        ("cat", "write 'a,b:c'"),
        (["cat:x", "cat:y"], "'cat' twice"),
        (["cat:dog", "dog:x"], "merged itself"),
    ):
        with pytest.raises(WrongUsage, match=message):
            of_table(table, merge=merge)
        with pytest.raises(WrongUsage, match=message):
            small(folder, merge=merge)


def test_groups_are_those_of_the_table(tmp_path):
    rows = [{**row, "patient": row["path"][1], "image": ""} for row in sound(tmp_path)]
    data = of_table(write(tmp_path / "x.csv", rows), val_fraction=0, test_fraction=0)
    samples = data.splits["train"]
    expected = group_ids(Path(path).stem[1] for path in samples.paths)
    assert samples.groups.tolist() == expected.tolist()
    assert data.scanned.remark.startswith(
        "path in column 'path' (not 'image'), one label per image in"
    )
    assert data.scanned.remark.endswith(", groups in column 'patient'")
    rows[3]["patient"] = ""
    with pytest.raises(ValueError, match="line 5, column patient: the group is empty"):
        of_table(write(tmp_path / "x.csv", rows))


@pytest.mark.parametrize("options", [{}, {"num_folds": 3, "fold": 2}, {"group_by": r"(\d)"}])
def test_training_images_keep_their_weights_in_any_split(tmp_path, options):
    rows = [{**row, "weight": i / 4} for i, row in enumerate(sound(tmp_path))]
    random.Random(0).shuffle(rows)
    data = of_table(write(tmp_path / "x.csv", rows), **options)
    assert data.splits.keys() == {"train", "val", "test"}
    weight_of = {row["path"]: row["weight"] for row in rows}
    train = data.splits.pop("train")
    assert train.weights.tolist() == [weight_of[Path(path).name] for path in train.paths]
    # metrics count each image once
    assert all(part.weights is None for part in data.splits.values())
    data.use_all_images("test")
    assert data.splits["test"].weights is None


def test_weights_that_are_all_0_are_refused(tmp_path):
    rows = [{**row, "sample_weight": 0} for row in sound(tmp_path)]
    data = of_table(write(tmp_path / "x.jsonl", rows))
    with pytest.raises(ValueError, match=r"all training images of .*x\.jsonl have the weight 0"):
        data.check_can_train()


SEVERAL = {
    "separated.csv": ["cat;dog", "", "bird", "dog", "cat; bird ;dog", "dog;cat"],
    "lists.jsonl": [["cat", "dog"], [], ["bird"], ["dog"], ["cat", "bird", "dog"], ["dog", "cat"]],
}


@pytest.mark.parametrize("name", [*SEVERAL, "columns.tsv"])
def test_several_labels_are_read_however_they_are_written(tmp_path, name):
    make(tmp_path, *(f"{i}.jpg" for i in range(6)))
    if name == "columns.tsv":
        labels = SEVERAL["lists.jsonl"]
        rows = [
            {"path": f"{i}.jpg", **{key: int(key in of_row) for key in ("dog", "cat", "bird")}}
            for i, of_row in enumerate(labels)
        ]
    else:
        rows = [{"path": f"{i}.jpg", "label": value} for i, value in enumerate(SEVERAL[name])]
    random.Random(1).shuffle(rows)
    data = of_table(write(tmp_path / name, rows), val_fraction=0, test_fraction=0)
    samples = data.splits["train"]
    assert data.label_kind == "several" and isinstance(samples.targets, MultiHot)
    assert "several labels per image" in data.scanned.remark
    assert [Path(path).name for path in samples.paths] == [f"{i}.jpg" for i in range(6)]
    if name == "columns.tsv":
        assert sorted(data.class_names) == ["bird", "cat", "dog"]
    assert [
        sorted(data.class_names[k] for k in np.flatnonzero(row)) for row in samples.targets.labels
    ] == [["cat", "dog"], [], ["bird"], ["dog"], ["bird", "cat", "dog"], ["cat", "dog"]]


def test_several_labels_of_an_image_are_excluded_and_merged_one_by_one(tmp_path):
    make(tmp_path, *(f"{i}.jpg" for i in range(6)))
    rows = [{"path": f"{i}.jpg", "label": v} for i, v in enumerate(SEVERAL["separated.csv"])]
    table = write(tmp_path / "x.csv", rows)
    data = of_table(table, val_fraction=0, test_fraction=0, exclude="bird")
    assert data.class_names == ["cat", "dog"] and len(data.splits["train"]) == 6
    assert data.splits["train"].targets.counts().tolist() == [3, 4]
    data = of_table(table, val_fraction=0, test_fraction=0, merge="cat,dog:pet")
    assert data.class_names == ["bird", "pet"]
    assert data.splits["train"].targets.labels.tolist() == [[0, 1], [0, 0], [1, 0], [0, 1], [1, 1], [0, 1]]  # fmt: skip


def test_a_row_for_each_label_of_an_image_if_that_is_set(tmp_path):
    make(tmp_path, *(f"{i}.jpg" for i in range(4)))
    rows = [{"path": f"{i // 2}.jpg", "label": "ab"[i % 2]} for i in range(4)]
    rows += [{"path": f"{i}.jpg", "label": "ab"[i % 2]} for i in (2, 3)]
    table = write(tmp_path / "x.csv", rows)
    with pytest.raises(ValueError, match="'a' here and 'b' in line 3"):
        of_table(table)
    data = of_table(table, labels="several", val_fraction=0, test_fraction=0)
    assert data.splits["train"].targets.labels.tolist() == [[1, 1], [1, 1], [1, 0], [0, 1]]


def test_a_listing_of_several_labels_counts_labels_and_compares_sets(tmp_path):
    make(tmp_path, *(f"{i}.jpg" for i in range(6)))
    rows = [{"path": f"{i}.jpg", "label": v} for i, v in enumerate(SEVERAL["separated.csv"])]
    listing = TableSource(write(tmp_path / "x.csv", rows), TableOptions()).listing()
    names = [listing.class_names[k] for k in listing.class_of]
    assert names == ["cat + dog", "no label", "bird", "dog", "bird + cat + dog", "cat + dog"]
    assert listing.label_names == ["bird", "cat", "dog"]
    assert listing.label_counts.tolist() == [[2, 3, 4]] and listing.counts().sum() == 6


@pytest.mark.parametrize(
    ("column", "values"),
    [
        *((name, ("train", "test")) for name in ("set", "phase", "stage", "fold", "data_split")),
        *((name, ("Training", "Validation")) for name in ("usage", "type", "dataset")),
        ("is_valid", ("False", "True")),
        ("is_valid", (0, 1)),
        ("IsTest", ("0.0", "1.0")),
        ("val", ("false", "true")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("has_indicators", [False, True])
def test_a_split_column_of_another_name_is_used(tmp_path, column, values, has_indicators):
    rows = sound(tmp_path)
    for i, row in enumerate(rows):
        if has_indicators:
            row |= {"a": int(row["label"] == "a"), "b": i % 2}
            del row["label"]
        row[column] = values[i % 3 == 0]
    data = of_table(write(tmp_path / "x.csv", rows), val_fraction=0)
    other = "test" if "test" in str((column, values)).lower() else "val"
    assert {split: len(part) for split, part in data.splits.items()} == {"train": 8, other: 4}
    assert sorted(data.class_names) == ["a", "b"]
    assert f"split in column {column!r}" in data.scanned.remark
    ignoring = of_table(tmp_path / "x.csv", columns="split:null", val_fraction=0.5)
    assert set(ignoring.splits) == {"train", "val", "test"}
    assert sorted(ignoring.class_names) == ["a", "b"]


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({"phase": "train", "set": "train"}, "'phase' and 'set' may both be the split"),
        ({"is_val": 0, "is_test": 0}, "'is_val' and 'is_test' may both be the split"),
        ({"is_train": 0}, "column is_train: '0' is not a split; use train, val or test"),
        ({"set": ""}, "column set: the split is empty"),
    ],
)
def test_a_split_column_that_is_not_understood_is_named(tmp_path, added, message):
    rows = [{**row, **dict.fromkeys(added, "train")} for row in sound(tmp_path)]
    if 0 in added.values():
        rows = [{**row, **dict.fromkeys(added, 1)} for row in rows]
    rows[3] |= added
    with pytest.raises(ValueError, match=re.escape(message)):
        of_table(write(tmp_path / "x.csv", rows))


@pytest.mark.parametrize("column", ["train", "Training", "valid", "dev", "testing", "fold"])
def test_columns_of_0_and_1_that_are_called_like_a_split_may_be_labels(tmp_path, caplog, column):
    """A train is a vehicle, too."""
    rows = [
        {"path": row["path"], "car": i % 2, "bus": int(i % 3 > 0), column: int(i > 3)}
        for i, row in enumerate(sound(tmp_path))
    ]
    table = write(tmp_path / "x.csv", rows)
    data = of_table(table)
    assert set(data.class_names) == {"car", "bus", column} and "split" not in data.scanned.remark
    line = f"the column {column!r} of 0 and 1 is a label; if it is the split, pass --data.columns split:{column}"
    assert caplog.text.count(line) == 1
    caplog.clear()
    of_table(table, columns="split:null")
    assert "is a label" not in caplog.text
    if column in ("valid", "dev", "testing"):
        data = of_table(table, columns=f"split:{column}", val_fraction=0)
        assert [len(part) for part in data.splits.values()] == [4, 8]
        assert data.class_names == ["bus", "car"]
    else:
        with pytest.raises(ValueError, match=r"'0' is not a split .*use train, val or test"):
            of_table(table, columns=f"split:{column}")


@pytest.mark.parametrize(
    "cell",
    [
        "['cat', 'dog']", '["cat","dog"]', "['cat' 'dog']", "[0, 1, 1]", "[0 1 1]", "{cat,dog}", "[]",
        '{"choices": ["cat", "dog"]}', "('cat', 'dog')", " [cat, dog] ", "['cat'\n 'dog']", "['cat';'dog']",
        ["cat", ["dog"]], {"choices": ["cat"]}, ["cat", "['dog']"],
    ],
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"labels": "several", "label_separator": ","}])
def test_a_list_that_was_written_as_text_is_no_class(tmp_path, cell, options):
    rows = sound(tmp_path)
    rows[3]["label"] = cell
    table = write(tmp_path / ("x.csv" if isinstance(cell, str) else "x.jsonl"), rows)
    with pytest.raises(ValueError, match=r"line \d, column label: .* is a list, not a label; wri"):
        of_table(table, **options)


@pytest.mark.parametrize(
    ("labels", "mark"),
    [
        (["cat", "dog", "cat, dog", "bird,dog", "bird,cat,dog", "bird"], "','"),
        (["scab", "rust", "scab rust", "rot", "scab rot", "rust rot", "scab rust rot"], "' '"),
        (["hot dog", "cat", "dog", "polar bear", "brown bear"], None),
        (["cat", "dog", "cat+dog"], None),
    ],
)
def test_classes_that_combine_other_classes_get_a_line(tmp_path, caplog, labels, mark):
    names = [f"{i}.jpg" for i in range(3 * len(labels))]
    make(tmp_path, *names)
    rows = [{"path": name, "label": labels[i // 3]} for i, name in enumerate(names)]
    data = of_table(write(tmp_path / "x.csv", rows), val_fraction=0, test_fraction=0)
    assert data.class_names == sorted(labels)
    line = f"pass --data.label_separator {mark}"
    assert (line in caplog.text) if mark else ("label_separator" not in caplog.text)


def test_an_image_of_two_groups_is_a_fault(tmp_path):
    rows = [{**row, "patient": row["path"][1]} for row in sound(tmp_path)]
    rows.append({**rows[3], "patient": "7"})
    table = write(tmp_path / "x.csv", rows)
    with pytest.raises(ValueError, match=r"line 5, column patient: .*'3' here and '7' in line 14"):
        of_table(table)
    data = of_table(table, on_bad_image="skip", val_fraction=0, test_fraction=0)
    assert len(data.splits["train"]) == 11


@pytest.mark.parametrize("is_tested", [False, True])
@pytest.mark.parametrize("is_single", [False, True])
def test_a_column_of_zeros_does_not_disappear(tmp_path, is_single, is_tested):
    rows = [
        {"path": row["path"], "a": int(i < 6), "b": int(i > 5 or not is_single), "c": 0}
        for i, row in enumerate(sound(tmp_path))
    ]
    if is_tested:
        rows = [{**row, "split": "train"} for row in rows]
        rows[0] |= {"a": 0, "b": 0, "c": 1, "split": "test"}
    table = write(tmp_path / "x.csv", rows)
    with pytest.raises(
        ValueError,
        match=r"x\.csv has no training image of the label c: no row that is trained on has 1 in its column; "
        r"add some, or skip it with --data\.exclude c",
    ):
        of_table(table)
    assert of_table(table, exclude="c").class_names == ["a", "b"]
    assert of_table(table, merge="b,c:d").class_names == ["a", "d"]


@pytest.mark.parametrize("value", ["", "-1", "-1.0", "nan"])
def test_a_blank_or_uncertain_label_in_a_column_of_0_and_1_is_named(tmp_path, value):
    rows = [
        {"path": row["path"], "a": i % 2, "b": int(i % 3 == 0)}
        for i, row in enumerate(sound(tmp_path))
    ]
    rows[4]["b"] = value
    table = write(tmp_path / "x.csv", rows)
    with pytest.raises(ValueError, match=rf"line 6, column b: '{value}' is not 0 or 1"):
        of_table(table)
    data = of_table(table, on_bad_image="skip", val_fraction=0, test_fraction=0)
    assert len(data.splits["train"]) == 11 and sorted(data.class_names) == ["a", "b"]


@pytest.mark.parametrize(
    ("written", "there"),
    [
        ("Pics/A1.JPG", "pics/a1.jpg"),
        ("pics/a1.jpeg", "pics/a1.jpg"),
        ("pics/a1", "pics/a1.jpg"),
        ("pics/v1.2", "pics/v1.2.png"),
        ("/pics/a1.jpg", "pics/a1.jpg"),
        ("pics/cafe\u0301.jpg", "pics/café.jpg"),
    ],
)
def test_a_file_that_is_there_under_a_similar_name_is_named(tmp_path, written, there):
    make(tmp_path, there)
    rows = [*sound(tmp_path), {"path": written, "label": "a"}]
    with pytest.raises(
        ValueError, match=f"does not exist; there is {re.escape(str(tmp_path / there))}"
    ):
        of_table(write(tmp_path / "x.csv", rows))  # fmt: skip


def test_rows_with_one_label_each_are_told_how_to_be_joined(tmp_path):
    rows = [*sound(tmp_path), {"path": "a0.jpg", "label": "b"}]
    with pytest.raises(ValueError, match="--data.labels several"):
        of_table(write(tmp_path / "x.csv", rows))


@pytest.mark.parametrize("seed", range(5))
def test_rows_that_are_added_move_no_image_to_another_split(tmp_path, seed):
    """Not even a folder with the same file names, or one that changes how many images lie in class folders."""
    rng = random.Random(seed)
    names = {split: {} for split in ("before", "after")}
    rows = [
        {"path": f"one/{name}/{i}.jpg", "label": name if rng.random() < 0.6 else "dog"}
        for name in ("cat", "dog")
        for i in range(60)
    ]
    added = [{**row, "path": row["path"].replace("one", "two")} for row in rows]
    added += [{"path": f"one/{i}.jpg", "label": "cat"} for i in range(40)]
    make(tmp_path, *(row["path"] for row in rows + added))
    for when, some in (("before", rows), ("after", rows + added)):
        data = of_table(write(tmp_path / "x.csv", some))
        for split, samples in data.splits.items():
            names[when] |= dict.fromkeys(samples.paths, split)
            assert sorted(samples.names()) == sorted(
                os.path.relpath(path, tmp_path) for path in samples.paths
            )
    assert {path: names["after"][path] for path in names["before"]} == names["before"]


def test_names_that_no_file_has_are_faults_and_no_crash(tmp_path):
    """JSON can hold halves of characters and zero bytes; a byte that is not UTF-8 is a name as any other."""
    make(tmp_path, os.fsdecode(b"caf\xe9.jpg"))
    rows = [*sound(tmp_path), {"path": "caf\udce9.jpg", "label": "a"}]
    data = of_table(write(tmp_path / "x.jsonl", rows), val_fraction=0, test_fraction=0)
    assert len(data.splits["train"]) == 13
    for row in (
        {"path": "\ud800.jpg", "label": "a"},
        {"path": "a\0.jpg", "label": "a"},
        {"path": "a0.jpg", "label": "\ud800"},
    ):
        with pytest.raises(ValueError, match=r"x\.jsonl, line 1, column (path|label): "):
            of_table(write(tmp_path / "x.jsonl", [row, *rows[1:]]))
    rows = [{**row, "group": "g"} for row in rows]
    rows[4]["group"] = "\ud800"
    with pytest.raises(ValueError, match=r"line 5, column group: the group has a name that is not"):
        of_table(write(tmp_path / "x.jsonl", rows))


def test_a_table_is_for_images_of_your_own(tmp_path):
    with pytest.raises(WrongUsage, match="not for FashionMNIST"):
        FashionMNIST(table=str(tmp_path / "x.csv"))


@pytest.mark.parametrize(
    "setting", [{"labels": "several"}, {"label_separator": ";"}, {"columns": "path:photo"}]
)
def test_settings_of_a_table_are_refused_for_a_folder(colours, setting):
    with pytest.raises(WrongUsage, match=f"--data.{next(iter(setting))} is for tables"):
        ImageFolderData(root=str(colours), **setting).read()


def test_each_file_is_asked_once(tmp_path, monkeypatch):
    rows = sound(tmp_path)
    table = write(tmp_path / "x.csv", rows)
    asked = []
    stat = os.stat
    monkeypatch.setattr(
        os, "stat", lambda path, **more: asked.append(str(path)) or stat(path, **more)
    )
    of_table(table)
    own = [path for path in asked if path.endswith(".jpg")]
    assert len(own) <= len(rows) + 1  # the first one, to find the folder of the paths


def test_many_rows_are_listed_fast(tmp_path, monkeypatch):
    """Without the disk, whose speed is another matter: it is asked once for each file."""
    num = 100_000
    rows = [{"path": f"c{i % 7}/{i}.jpg", "label": f"c{i % 7}"} for i in range(num)]
    table = write(tmp_path / "x.csv", rows)
    stats = FileStats(np.ones(num, np.int64), np.ones((num, 2), np.int64), np.ones(num, bool))
    monkeypatch.setattr("finetune.data.tables.table_rows.file_stats", lambda paths: stats)
    began = time.process_time()
    images = TableSource(table, TableOptions()).find(None)
    # 1 s of an idle core, twice as much where every core is shared
    assert time.process_time() - began < 3
    assert len(images.splits["all"]) == num
