"""--data.corrections changes labels only: not splits, names, order, folds or groups, of folders and of tables."""

from pathlib import Path

import numpy as np
import pytest
from data_files import paths, small
from promise import control, promise

from finetune import ImageFolderData
from finetune.data.corrections import Correction, CorrectionsFile, correct, read_corrections
from finetune.data.data_place import for_other_place
from finetune.data.datasets.scan import scan
from finetune.data.listing import ScanOptions
from finetune.data.seen import build_record
from finetune.data.splits import stratified


@pytest.fixture
def write(tmp_path):
    """Write a file of corrections from {path: (was, now)}; returns its path."""

    def into(rows: dict[str, tuple[str, str]]) -> str:
        file = CorrectionsFile(tmp_path / "corrections.csv")
        for path, (was, now) in rows.items():
            file.append(Correction(path, was, now, "me", "now"))
        return str(file.path)

    return into


def labels(data: ImageFolderData) -> dict[str, str]:
    """Return the class of each image by split and path."""
    return {
        f"{split}: {path}": data.class_names[label]
        for split, samples in data.splits.items()
        for path, label in zip(paths(data, split), samples.targets.labels, strict=True)
    }


def total(data: ImageFolderData, what: str) -> int:
    return data.scanned.corrections.total(what)


ROWS = {
    "train/blue/00.png": ("blue", "red"),
    "train/blue/01.png": ("blue", "excluded"),
    "train/green/02.png": ("green", "green"),
    "train/red/gone.png": ("red", "blue"),
    "train/red/03.png": ("blue", "green"),  # its label has changed since
    "test/red/00.png": ("red", "blue"),
    "test/red/01.png": ("red", "excluded"),
}


@promise("corrections")
def test_labels_change_and_images_go_but_none_moves(colours, write):
    plain = small(colours, val_fraction=0.3)
    data = small(colours, val_fraction=0.3, corrections=write(ROWS))
    before, after = labels(plain), labels(data)
    (gone,) = before.keys() - after.keys()
    assert gone.endswith(" train/blue/01.png") and after.keys() <= before.keys()
    changed = {key: after[key] for key in after if after[key] != before[key]}
    (key,) = changed
    assert key.endswith(" train/blue/00.png") and changed[key] == "red"
    assert [key for key in before if key in after] == list(after)  # in the same order
    line = data.scanned.corrections.line()
    for words in ("1 label changed, 1 image excluded", "2 of test images not applied", "1 skipped"):
        assert words in line
    # the record of seen images lacks the excluded one
    seen, now = (build_record(part.splits["train"], None).train for part in (plain, data))
    assert set(now.tolist()) < set(seen.tolist()) and len(seen) - len(now) == 1
    assert data.fingerprint != plain.fingerprint


@control("corrections")
def test_control_moved_files_would_change_the_split(colours):
    """Why corrections keep the names: files of other names may come into another split."""
    data = small(colours, val_fraction=0.3)
    names = [*data.splits["train"].names(), *data.splits["val"].names()]
    moved = [name.replace("blue/", "red/m") for name in names]
    strata = np.zeros(len(names), np.int64)
    parts = [stratified(each, strata, (0.3,), 0)[1].tolist() for each in (names, moved)]
    assert parts[0] != parts[1]


def test_without_a_correction_everything_is_as_without_the_file(colours, write):
    plain = small(colours, val_fraction=0.3)
    data = small(colours, val_fraction=0.3, corrections=write({"x.png": ("red", "blue")}))
    assert labels(data) == labels(plain) and data.fingerprint == plain.fingerprint


def test_correct_test_corrects_the_test_images_too(colours, write):
    data = small(colours, corrections=write(ROWS), correct_test=True)
    assert len(data.splits["test"]) == 29 and labels(data)["test: test/red/00.png"] == "blue"
    in_test = data.scanned.corrections.plain()["splits"]["test"]
    assert (in_test["changed"], in_test["excluded"]) == (1, 1)
    assert in_test["pairs"] == [["red", "blue", 1]]
    with pytest.raises(ValueError, match="data.correct_test needs"):
        small(colours, correct_test=True)


def test_corrections_that_will_not_do_are_refused(colours, write):
    with pytest.raises(ValueError, match="train/blue/02.png is corrected to 'rad'.*'red'"):
        small(colours, corrections=write({"train/blue/02.png": ("blue", "rad")}))
    Path(write({"train/blue/02.png": ("blue", "blue")})).unlink()
    rows = {f"train/red/{i:02d}.png": ("red", "excluded") for i in range(20)}
    with pytest.raises(ValueError, match="to train on of red"):
        small(colours, corrections=write(rows), val_fraction=0.2).setup("fit")


def test_corrections_to_excluded_and_merged_classes(colours, write):
    file = write({"train/blue/00.png": ("blue", "red"), "train/red/00.png": ("red", "green")})
    assert total(small(colours, corrections=file, exclude=["red"]), "excluded") == 1
    data = small(colours, corrections=file, merge="red,green:warm", val_fraction=0.2)
    assert data.class_names == ["blue", "warm"]
    assert total(data, "changed") == total(data, "confirmed") == 1


def test_corrections_move_no_image_between_folds_and_groups(colours, write):
    rows = {path.removeprefix("train/"): row for path, row in ROWS.items() if "train" in path}
    tested = []
    for fold in (1, 2, 3):
        options = {"num_folds": 3, "fold": fold, "group_by": r"(\d)\d\.png"}
        before = labels(small(colours / "train", **options))
        data = small(colours / "train", corrections=write(rows), **options)
        after = labels(data)
        changed = {key.split(": ")[1] for key in before if after.get(key) != before[key]}
        is_tested = {path for path in rows if f"test: {path}" in before}
        tested += sorted(is_tested)
        # two labels change; those of the images that this fold tests do not
        assert changed == {"blue/00.png", "blue/01.png"} - is_tested
        assert data.scanned.corrections.in_test == len(is_tested & {"blue/00.png", "blue/01.png"})
    assert sorted(tested) == sorted(path for path in rows if path != "red/gone.png")


def test_a_table_is_corrected_as_its_folder_is(colours, tmp_path, write):
    files = sorted((colours / "train").glob("*/*.png"))
    table = tmp_path / "of_colours.csv"
    rows = [f"{path.relative_to(colours)},{path.parent.name}" for path in files]
    table.write_text("\n".join(["path,label", *rows]) + "\n")
    file = write({path: label for path, label in ROWS.items() if path.startswith("train")})
    options = {"root": str(colours), "test_fraction": 0.0, "corrections": file}
    data = ImageFolderData(table=str(table), **options)
    assert (total(data, "changed"), total(data, "excluded")) == (1, 1)
    assert data.scanned.corrections.unknown == 1


# Several labels


SEVERAL = {
    "red/00.png": ("warm;red", "red"),  # in any order
    "red/01.png": ("red;warm", '["cold", "warm", "red"]'),
    "red/02.png": ("red;warm", "[]"),
    "red/03.png": ("red;warm", "excluded"),
    "red/04.png": ("red;warm", "warm;red"),
    "red/05.png": ("red", "warm"),  # its labels have changed since
}


@pytest.fixture
def several(colours):
    """A table of 40 images, each with two of four labels."""
    table = colours.parent / "several.csv"
    rows = [f"red/{i:02d}.png,red;warm" for i in range(20)]
    rows += [f"blue/{i:02d}.png,blue;cold" for i in range(20)]
    table.write_text("\n".join(["path,label", *rows]) + "\n")
    return {"table": str(table), "root": str(colours / "train"), "test_fraction": 0.0}


def names(data: ImageFolderData) -> dict[str, list[str]]:
    """Return the labels of each image; an empty list for none."""
    return {
        name: [data.class_names[k] for k in np.flatnonzero(row)]
        for samples in data.splits.values()
        for name, row in zip(samples.names(), samples.targets.labels, strict=True)
    }


def test_several_labels_of_an_image_are_corrected(several, write):
    data = ImageFolderData(**several, corrections=write(SEVERAL), val_fraction=0.0)
    found = names(data)
    expected = {"00": ["red"], "01": ["cold", "red", "warm"], "02": [], "05": ["red", "warm"]}
    assert {number: found[f"red/{number}.png"] for number in expected} == expected
    assert len(found) == 39 and "red/03.png" not in found and found["red/06.png"] == ["red", "warm"]
    line = data.scanned.corrections.line()
    assert "3 images changed, 1 image excluded; 1 skipped" in line and total(data, "confirmed") == 1
    # `finetune check` and `review` list the same
    decisions = read_corrections(data.corrections)
    listed = scan(several["table"], ScanOptions(root=several["root"]))
    listed = correct(listed, data.corrections, decisions)
    assert listed.corrections.line() == line
    for i, name in enumerate(listed.names()):
        assert [listed.class_names[k] for k in listed.labels_of(i)] == found[name]
    with pytest.raises(ValueError, match="red/07.png is corrected to 'worm', .*'warm'"):
        wrong = write({"red/07.png": ("red;warm", "red;worm")})
        ImageFolderData(**several, corrections=wrong).read()


def test_several_labels_with_excluded_and_merged_classes(several, write):
    options = {"exclude": ["warm"], "merge": "blue,cold:chilly"}
    found = names(ImageFolderData(**several, **options, corrections=write(SEVERAL)))
    assert found["red/00.png"] == ["red"] == found["red/04.png"]
    assert found["red/01.png"] == ["chilly", "red"] and found["red/05.png"] == []
    assert found["blue/00.png"] == ["chilly"]


def test_corrections_and_groups_belong_to_their_folder(tmp_path):
    arguments = {"root": str(tmp_path / "a"), "corrections": "c.csv", "correct_test": True}
    arguments |= {"group_by": "folder", "batch_size": 3}
    assert for_other_place(arguments, None) == arguments
    assert for_other_place(arguments, str(tmp_path / "b/../a")) == arguments
    other = for_other_place(arguments, str(tmp_path / "b"))
    assert other == {"root": str(tmp_path / "a"), "batch_size": 3}
