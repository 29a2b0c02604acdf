"""Corrected labels in a data module change labels only, not splits, names or order."""

from pathlib import Path

import numpy as np
import pytest
from data_files import paths, small
from promise import control, promise

from finetune.data.corrected_samples import for_other_place
from finetune.data.corrections import Correction, CorrectionsFile, read_corrections
from finetune.data.datasets.image_folder import ImageFolderData
from finetune.data.datasets.listing import correct_listing
from finetune.data.datasets.table_source import TableSource
from finetune.data.tables.table_rows import TableOptions


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
    before = labels(small(colours, val_fraction=0.3))
    file = write(ROWS)
    data = small(colours, val_fraction=0.3, corrections=file)
    after = labels(data)
    (gone,) = before.keys() - after.keys()
    assert gone.endswith(" train/blue/01.png") and after.keys() <= before.keys()
    changed = {key: after[key] for key in after if after[key] != before[key]}
    (key,) = changed
    assert key.endswith(" train/blue/00.png") and changed[key] == "red"
    assert [key for key in before if key in after] == list(after)  # in the same order
    assert data.scanned.corrections.line() == (
        f"corrections: {file}: 1 label changed, 1 image excluded; 2 of test images not applied "
        "(--data.correct_test true); 1 skipped, because the label has changed since; "
        "1 of images that are not in the data set"
    )


@control("corrections")
def test_control_moved_files_would_change_the_split(colours, tmp_path):
    """Why corrections keep the names: files of other names may come into another split."""
    from finetune.data.splits import stratified

    data = small(colours, val_fraction=0.3)
    names = [*data.splits["train"].names(), *data.splits["val"].names()]
    moved = [name.replace("blue/", "red/m") for name in names]
    strata = np.zeros(len(names), np.int64)
    assert (
        stratified(names, strata, (0.3,), 0)[1].tolist()
        != stratified(moved, strata, (0.3,), 0)[1].tolist()
    )


def test_test_images_are_corrected_when_asked(colours, write):
    file = write(ROWS)
    data = small(colours, corrections=file, correct_test=True)
    assert len(data.splits["test"]) == 29
    assert labels(data)["test: test/red/00.png"] == "blue"
    plain = data.scanned.corrections.plain()
    assert plain["in_test"] == 0 and plain["splits"]["test"] == {
        "changed": 1,
        "excluded": 1,
        "confirmed": 0,
        "outdated": 0,
        "pairs": [["red", "blue", 1]],
    }
    assert ", 2 of them in test" in data.scanned.corrections.line()
    with pytest.raises(ValueError, match="--data.correct_test needs a file"):
        small(colours, correct_test=True)


def test_without_a_correction_everything_is_as_without_the_file(colours, write):
    plain = small(colours, val_fraction=0.3)
    data = small(colours, val_fraction=0.3, corrections=write({"x.png": ("red", "blue")}))
    assert labels(data) == labels(plain) and data.fingerprint == plain.fingerprint
    other = small(colours, val_fraction=0.3, corrections=write(ROWS))
    assert other.fingerprint != plain.fingerprint  # the control


def test_the_record_of_seen_images_lacks_excluded_ones_and_keeps_names(colours, write):
    plain = small(colours, val_fraction=0.3)
    data = small(colours, val_fraction=0.3, corrections=write(ROWS))
    assert data.seen is not None and plain.seen is not None
    assert set(data.seen.names.tolist()) < set(plain.seen.names.tolist())
    assert len(plain.seen.names) - len(data.seen.names) == 1


def test_an_unknown_class_is_refused_by_its_name(colours, write):
    file = write({"train/blue/00.png": ("blue", "rad")})
    with pytest.raises(
        ValueError, match="train/blue/00.png is corrected to 'rad', which is not a class.*'red'"
    ):
        small(colours, corrections=file)


def test_an_image_of_an_excluded_class_is_excluded(colours, write):
    file = write({"train/blue/00.png": ("blue", "red")})
    data = small(colours, corrections=file, exclude=["red"])
    assert sum(split.excluded for split in data.scanned.corrections.splits.values()) == 1


def test_of_merged_classes_both_names_are_understood(colours, write):
    file = write({"train/blue/00.png": ("blue", "red"), "train/red/00.png": ("red", "green")})
    data = small(colours, corrections=file, merge="red,green:warm", val_fraction=0.2)
    applied = data.scanned.corrections
    assert data.class_names == ["blue", "warm"]
    assert sum(split.changed for split in applied.splits.values()) == 1
    assert sum(split.confirmed for split in applied.splits.values()) == 1


def test_a_table_is_corrected_as_its_folder_is(colours, tmp_path, write):
    rows = [
        f"{path.relative_to(colours)},{path.parent.name}"
        for path in sorted((colours / "train").glob("*/*.png"))
    ]
    table = tmp_path / "of_colours.csv"
    table.write_text("\n".join(["path,label", *rows]) + "\n")
    file = write({path: label for path, label in ROWS.items() if path.startswith("train")})
    options = {"val_fraction": 0.2, "corrections": file}
    data = ImageFolderData(table=str(table), root=str(colours), test_fraction=0.0, **options)
    assert (
        data.scanned.corrections.line()
        .split(": ", 2)[2]
        .startswith("1 label changed, 1 image excluded")
    )
    assert data.scanned.corrections.unknown == 1


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


def names(data: ImageFolderData, path: str) -> list[str]:
    """Return the labels of an image; an empty list for none."""
    for samples in data.splits.values():
        found = list(samples.names())
        if path in found:
            row = samples.targets.labels[found.index(path)]
            return [data.class_names[k] for k in np.flatnonzero(row)]
    raise LookupError(path)


def test_several_labels_of_an_image_are_corrected(several, write):
    data = ImageFolderData(**several, corrections=write(SEVERAL))
    assert names(data, "red/00.png") == ["red"]
    assert names(data, "red/01.png") == ["cold", "red", "warm"]
    assert names(data, "red/02.png") == []
    assert names(data, "red/05.png") == ["red", "warm"] == names(data, "red/06.png")
    with pytest.raises(LookupError):
        names(data, "red/03.png")
    line = data.scanned.corrections.line()
    assert "labels of 3 images changed, 1 image excluded; 1 skipped" in line
    assert sum(split.confirmed for split in data.scanned.corrections.splits.values()) == 1
    with pytest.raises(ValueError, match="red/00.png is corrected to 'worm', .*'warm'"):
        data = ImageFolderData(
            **several, corrections=write({"red/00.png": ("red;warm", "red;worm")})
        )
        data.read()


def test_a_listing_of_several_labels_is_corrected_as_the_data_are(several, write):
    file = write(SEVERAL)
    options = TableOptions(root=several["root"])
    listing, applied = correct_listing(
        TableSource(Path(several["table"]), options).listing(), read_corrections(file)
    )
    data = ImageFolderData(**several, corrections=file, val_fraction=0.0)
    found = {
        listing.name(i): listing.class_names[k].split(" + ") for i, k in enumerate(listing.class_of)
    }
    found |= {name: [] for name, labels in found.items() if labels == ["no label"]}
    assert found == {name: names(data, name) for name in data.splits["train"].names()}
    assert (
        listing.label_counts.sum(axis=0).tolist() == data.splits["train"].targets.counts().tolist()
    )
    assert applied.line() == data.scanned.corrections.line()


def test_corrections_move_no_image_between_folds_and_groups(colours, write):
    rows = {path.removeprefix("train/"): row for path, row in ROWS.items() if "train" in path}
    root = colours / "train"
    tested = []
    for fold in (1, 2, 3):
        options = {"num_folds": 3, "fold": fold, "group_by": r"(\d)\d\.png"}
        before = labels(small(root, **options))
        data = small(root, corrections=write(rows), **options)
        after = labels(data)
        changed = {key.split(": ")[1] for key in before if after.get(key) != before[key]}
        is_tested = {path for path in rows if f"test: {path}" in before}
        tested += sorted(is_tested)
        # two labels change; those of the images that this fold tests do not
        assert changed == {"blue/00.png", "blue/01.png"} - is_tested
        assert data.scanned.corrections.in_test == len(is_tested & {"blue/00.png", "blue/01.png"})
    assert sorted(tested) == sorted(path for path in rows if path != "red/gone.png")


def test_several_labels_with_excluded_and_merged_classes(several, write):
    options = {"exclude": ["warm"], "merge": "blue,cold:chilly"}
    data = ImageFolderData(**several, **options, corrections=write(SEVERAL))
    assert names(data, "red/00.png") == ["red"] == names(data, "red/04.png")
    assert names(data, "red/01.png") == ["chilly", "red"] and names(data, "red/05.png") == []
    assert names(data, "blue/00.png") == ["chilly"]


def test_a_class_without_images_is_named(colours, write):
    rows = {f"train/red/{i:02d}.png": ("red", "excluded") for i in range(20)}
    data = small(colours, corrections=write(rows), val_fraction=0.2)
    with pytest.raises(ValueError, match="to train on of red"):
        data.setup("fit")


def test_corrections_and_groups_belong_to_their_folder(tmp_path):
    arguments = {
        "root": str(tmp_path / "a"),
        "corrections": "c.csv",
        "correct_test": True,
        "group_by": "folder",
        "batch_size": 3,
    }
    assert for_other_place(arguments, None) == arguments
    assert for_other_place(arguments, str(tmp_path / "b/../a")) == arguments
    assert for_other_place(arguments, str(tmp_path / "b")) == {
        "root": str(tmp_path / "a"),
        "batch_size": 3,
    }
