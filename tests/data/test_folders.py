"""Layouts of folders, classes matched by name, and messages about unusable folders."""

import os
from pathlib import Path

import numpy as np
import pytest

from finetune.data.datasets.class_changes import ClassChanges
from finetune.data.datasets.folders import find_images, scan
from finetune.data.decode import IMAGE_SUFFIXES
from finetune.data.samples import Samples
from finetune.system.file_names import composed
from finetune.system.messages import WrongUsage


def make(root: Path, *names: str) -> Path:
    """Files of one byte each, because these tests decode no image."""
    root.mkdir(parents=True, exist_ok=True)
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if " -> " in name:
            link, target = name.split(" -> ")
            (root / link).symlink_to(target)
        elif not name.endswith("/"):
            (root / name).write_bytes(b"x")
        else:
            (root / name).mkdir()
    return root


def listed(root: Path, files: Samples) -> dict[str, int]:
    paths = [Path(path).relative_to(root).as_posix() for path in files.paths]
    return dict(zip(paths, files.targets.labels.tolist(), strict=True))


NFC, NFD = "café", "cafe\u0301"


@pytest.mark.parametrize(("train", "val"), [(NFC, NFD), (NFD, NFC), (NFD, NFD), (NFC, NFC)])
def test_classes_are_matched_in_composed_unicode(tmp_path, train, val):
    make(tmp_path, f"train/{train}/1.png", "train/tea/1.png", f"val/{val}/2.png", "val/tea/2.png")
    names, files = scan(tmp_path)
    assert names == [NFC, "tea"]
    assert listed(tmp_path, files["train"]) == {f"train/{train}/1.png": 0, "train/tea/1.png": 1}
    assert listed(tmp_path, files["val"]) == {f"val/{val}/2.png": 0, "val/tea/2.png": 1}
    # A checkpoint's names, whichever they are, stay as they are.
    for known in ([NFC, "tea"], ["tea", NFD]):
        again, files = scan(tmp_path, known)
        assert again == known
        assert listed(tmp_path, files["val"])[f"val/{val}/2.png"] == [*map(composed, known)].index(
            NFC
        )


@pytest.mark.parametrize("split", ["train", "val", "."])
def test_one_class_in_two_compositions_is_refused(tmp_path, split):
    if split != ".":
        make(tmp_path, f"train/{NFC}/1.png", "train/tea/1.png", f"val/{NFC}/1.png")
    make(tmp_path / split, f"{NFC}/1.png", f"{NFD}/1.png", "tea/1.png")
    for known in (None, [NFC, "tea"]):
        with pytest.raises(ValueError, match="two folders of the class 'café': keep one"):
            scan(tmp_path, known)
    with pytest.raises(
        ValueError, match=r"data.class_names, for .*, holds the class 'café' more than once"
    ):
        scan(make(tmp_path / "b", f"{NFC}/1.png", "tea/1.png"), [NFC, NFD])


TRAIN = ("train/cat/1.png", "train/dog/1.png", "train/dog/2.png")


@pytest.mark.parametrize(
    ("train", "val", "test"),
    [
        ("train", "val", "test"),
        ("Training", "validation", "testing"),
        ("TRAIN", "Valid", "Test"),
        ("train", "dev", "TEST"),
    ],
)
def test_splits_by_the_names_of_their_folders(tmp_path, train, val, test):
    for split in (train, val, test):
        make(tmp_path, f"{split}/dog/{split}.png", f"{split}/cat/{split}.png")
    make(tmp_path, "notes/x.txt", "results/plots/x.png", "readme.png")
    names, files = scan(tmp_path)
    assert names == ["cat", "dog"] and set(files) == {"train", "val", "test"}
    for split, folder in {"train": train, "val": val, "test": test}.items():
        assert listed(tmp_path, files[split]) == {
            f"{folder}/cat/{folder}.png": 0,
            f"{folder}/dog/{folder}.png": 1,
        }
    assert files["train"].targets.labels.dtype == np.int64


def test_a_class_may_be_called_as_a_split_is(tmp_path):
    """A folder that holds images, next to class folders, is a class: here vehicles."""
    make(tmp_path, "bus/1.png", "car/1.png", "train/1.png", "Test/1.png")
    names, files = scan(tmp_path)
    assert (
        names == ["Test", "bus", "car", "train"]
        and list(files) == ["all"]
        and len(files["all"]) == 4
    )


@pytest.mark.parametrize("others", [(), ("test/dog/1.png", "test/cat/1.png")])
def test_splits_that_are_missing_stay_missing(tmp_path, others):
    make(tmp_path, *TRAIN, *others)
    assert set(scan(tmp_path)[1]) == {"train"} | {name.split("/")[0] for name in others}


def test_class_folders_alone_are_one_split(tmp_path):
    make(tmp_path, "dog/1.png", "cat/1.png", "cat/2.png")
    names, files = scan(str(tmp_path))
    assert names == ["cat", "dog"] and list(files) == ["all"]
    assert listed(tmp_path, files["all"]) == {"cat/1.png": 0, "cat/2.png": 0, "dog/1.png": 1}


def test_which_files_count(tmp_path):
    good = [
        "a.png",
        "B.JPG",
        "c.JpEg",
        "d.webp",
        "e.bmp",
        "f.tif",
        "g.TIFF",
        "h.gif",
        "deep/er/i.png",
        "j.k.png",
    ]
    others = [
        ".hidden.png",
        "._a.png",
        ".cache/a.png",
        "readme.txt",
        "png",
        "a.svg",
        "thumbs.db",
        "deep/.x/y.png",
    ]
    make(tmp_path, *(f"train/{c}/{name}" for c in ("cat", "dog") for name in (*good, *others)))
    make(tmp_path, "train/.git/x.png", ".cache/train/cat/x.png", "train/loose.png")
    names, files = scan(tmp_path)
    assert names == ["cat", "dog"]
    assert set(listed(tmp_path, files["train"])) == {
        f"train/{c}/{name}" for c in names for name in good
    }


def test_files_come_sorted_whatever_the_file_system_says(tmp_path, monkeypatch):
    names = ["cat/10.png", "cat/2.png", "cat/B.png", "cat/a/z.png", "dog/1.png"]
    make(tmp_path, *names)
    expected = [str(tmp_path / name) for name in names]
    assert list(scan(tmp_path)[1]["all"].paths) == expected
    listdir, scandir = os.listdir, os.scandir

    class Reversed(list):
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(
        os, "scandir", lambda folder: Reversed(sorted(scandir(folder), key=lambda e: e.name)[::-1])
    )
    monkeypatch.setattr(os, "listdir", lambda folder: sorted(listdir(folder))[::-1])
    assert list(scan(tmp_path)[1]["all"].paths) == expected


def test_classes_are_matched_by_name_not_by_position(tmp_path, caplog):
    make(
        tmp_path,
        "train/ant/1.png",
        "train/bee/1.png",
        "train/cat/1.png",
        "test/cat/1.png",
        "test/bee/1.png",
    )
    names, files = scan(tmp_path)
    assert names == ["ant", "bee", "cat"]
    # by position: 0 and 1
    assert listed(tmp_path, files["test"]) == {"test/bee/1.png": 1, "test/cat/1.png": 2}
    (record,) = caplog.records
    assert "'ant'" in record.getMessage() and str(tmp_path / "test") in record.getMessage()


def test_known_class_names_decide_the_order_and_need_no_training_split(tmp_path):
    make(tmp_path, "test/cat/1.png", "test/dog/1.png")
    names, files = scan(tmp_path, ["dog", "cat"])
    assert names == ["dog", "cat"] and listed(tmp_path, files["test"]) == {
        "test/dog/1.png": 0,
        "test/cat/1.png": 1,
    }


@pytest.mark.parametrize("train", ["", "train/"])
def test_known_classes_need_not_all_have_images(tmp_path, caplog, train):
    make(
        tmp_path,
        f"{train}cat/1.png",
        f"{train}dog/",
        *(["test/cat/1.png", "test/dog/2.png"] if train else []),
    )
    names, files = scan(tmp_path, ["cat", "dog"])
    split = "train" if train else "all"
    assert names == ["cat", "dog"] and files[split].targets.counts()[1] == 0
    assert listed(tmp_path, files[split]) == {f"{train}cat/1.png": 0}
    folder = tmp_path / train
    assert caplog.messages == [
        f"{folder} has no images of the class 'dog': its results do not include it"
    ]
    assert not train or (len(files["test"]) == 2 and files["test"].targets.counts().all())
    with pytest.raises(ValueError, match="has no images of the class 'dog'; supported are"):
        scan(tmp_path)


def test_links_to_folders_are_followed(tmp_path):
    make(tmp_path / "store", "1.png")
    make(tmp_path / "data", "dog/2.png")
    (tmp_path / "data/cat").symlink_to(tmp_path / "store")
    assert listed(tmp_path, scan(tmp_path / "data")[1]["all"]) == {
        "data/cat/1.png": 0,
        "data/dog/2.png": 1,
    }


def test_what_is_left_out_is_reported_in_a_line(tmp_path, caplog):
    make(
        tmp_path,
        *TRAIN,
        "train/cat/a.PSD",
        "train/dog/deep/b.psd",
        "train/dog/c.svg",
        "train/cat/without",
    )
    make(
        tmp_path,
        "train/cat/notes.txt",
        "train/.DS_Store",
        "train/cat/Thumbs.db",
        "train/1.jpg",
        "train/2.jpg",
        "3.png",
    )
    scan(tmp_path)
    kinds, loose = caplog.messages
    assert kinds.startswith(f"skipped in {tmp_path}, not images: 2 .psd, ")
    assert (
        "1 .svg" in kinds
        and "1 without a suffix" in kinds
        and ".txt" not in kinds
        and ".db" not in kinds
    )
    assert kinds.endswith(f"supported are {' '.join(sorted(IMAGE_SUFFIXES))}")
    assert loose == f"skipped 2 images outside of class folders, in {tmp_path / 'train'}"
    caplog.clear()
    scan(tmp_path, is_logged=False)
    assert not caplog.messages


@pytest.mark.parametrize("suffix", [".jxl", ".pdf", ".svg", ".psd"])
def test_files_of_other_kinds_are_left_out_by_name_in_any_case(tmp_path, caplog, suffix):
    make(tmp_path, *TRAIN, f"train/cat/a{suffix}", f"train/dog/b{suffix.upper()}")
    _, files = scan(tmp_path)
    assert set(listed(tmp_path, files["train"])) == set(TRAIN)
    (line,) = caplog.messages
    assert line.startswith(f"skipped in {tmp_path}, not images: 2 {suffix}; supported are ")


def test_folders_that_cannot_be_read_are_named_or_left_out(tmp_path, monkeypatch, caplog):
    make(tmp_path, *TRAIN, "train/cat/secret/1.png", "train/dog/back -> ..")
    scandir = os.scandir

    def guarded(folder):  # for root may read all
        if Path(folder).name == "secret":
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", guarded)
    with pytest.raises(PermissionError, match="train/cat/secret"):
        scan(tmp_path)
    _, files = scan(tmp_path, skip=True)
    assert set(listed(tmp_path, files["train"])) == set(TRAIN)
    assert caplog.messages == [
        f"skipped the folder {tmp_path}/train/cat/secret: Permission denied",
        f"skipped {tmp_path}/train/dog/back is a link to a folder that it lies in",
    ]


def test_links_to_nothing_are_reported(tmp_path, caplog):
    make(tmp_path, *TRAIN)
    (tmp_path / "train/hen").symlink_to(tmp_path / "gone")
    class_names, _ = scan(tmp_path)
    assert class_names == ["cat", "dog"]
    assert f"skipped {tmp_path}/train/hen: a dangling link" in caplog.messages


def test_find_images_of_an_empty_folder_are_none(tmp_path):
    assert list(find_images(tmp_path)) == []


# The files, the known classes, and what the message must name: what is wrong, where, and what to do.
ERRORS = {
    "unknown class in test": ((*TRAIN, "test/cow/1.png"), None, ["'cow'", "test", "cat, dog"]),
    "two unknown classes": (
        (*TRAIN, "val/cow/1.png", "val/hen/1.png"),
        None,
        ["'cow'", "'hen'", "classes"],
    ),
    "unknown to the checkpoint": (TRAIN, ["cat", "cow"], ["'dog'", "cat, cow"]),
    "empty class": ((*TRAIN, "train/hen/"), None, ["'hen'", "train", ".jpg"]),
    "known classes, no image": (("cat/", "dog/1.txt"), ["cat", "dog"], ["'cat', 'dog'", ".jpg"]),
    "class of other files": ((*TRAIN, "train/hen/1.txt"), None, ["'hen'", "train", ".jpg"]),
    "one class": (("train/cat/1.png",), None, ["'cat'", "train", "at least two"]),
    "one class alone": (("cat/1.png",), None, ["'cat'", "at least two"]),
    "no class folders": (("train/1.png",), None, ["train", "class folders", "put the images"]),
    "nothing at all": ((), None, ["class folders", "put the images"]),
    "two validation splits": (
        (*TRAIN, "val/cat/1.png", "valid/cat/1.png"),
        None,
        ["'val'", "'valid'", "keep one"],
    ),
    "two spellings": ((*TRAIN, "Train/cat/1.png"), None, ["'train'", "'Train'", "keep one"]),
    "splits and classes": (
        (*TRAIN, "bus/1.png", "car/2.jpg"),
        None,
        ["'train'", "'bus'", "'car'", "next to them", "move"],
    ),
    "splits and a class called train": (
        ("train/1/1.png", "bus/1.png", "car/2.jpg"),
        None,
        ["'train'", "'bus'", "name"],
    ),
    "classes that differ in case": (
        (*TRAIN, "test/Cat/1.png"),
        None,
        ["'Cat'", "test", "'Cat' is 'cat' there"],
    ),
    "a link that leads back": (
        (*TRAIN, "train/cat/back -> ../.."),
        None,
        ["cat/back is a link", "on_bad_image skip"],
    ),
    "links that lead to each other": (
        (
            *TRAIN,
            "train/cat/a -> ../dog",
            "train/cat/b -> ../dog",
            "train/dog/a -> ../cat",
            "train/dog/b -> ../cat",
        ),
        None,
        ["cat/a/a is a link", "on_bad_image skip"],
    ),
    "a class twice": (TRAIN, ["dog", "cat", "dog"], ["class_names", "'dog' more than once"]),
    "no training": (("test/cat/1.png", "test/dog/1.png"), None, ["test", "train"]),
    "no training but two others": (("test/cat/1.png", "val/cat/1.png"), None, ["test", "train"]),
}


@pytest.mark.parametrize("name", ["", "..", "../cat", "dog/../../cat", "/etc", "a\x1b[2Jb", "a\nb"])
def test_given_class_names_lead_to_no_other_folder_and_to_no_terminal(tmp_path, name):
    make(tmp_path / "data", *TRAIN)
    with pytest.raises(
        WrongUsage, match=r"data\.class_names: '.*' is not the name of a class folder"
    ) as caught:
        scan(tmp_path / "data", ["dog", name])
    assert "\x1b" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("case", ERRORS)
def test_folders_that_will_not_do(tmp_path, case):
    names, class_names, words = ERRORS[case]
    with pytest.raises((ValueError, OSError)) as caught:
        scan(make(tmp_path / "data", *names), class_names)
    message = str(caught.value)
    assert str(tmp_path / "data") in message and "\n" not in message
    assert all(word in message for word in words), message


def test_a_root_that_is_no_folder(tmp_path):
    make(tmp_path, "photos.zip")
    for name, what in ("nowhere", "does not exist"), ("photos.zip", "is a file"):
        with pytest.raises(FileNotFoundError) as caught:
            scan(tmp_path / name)
        message = str(caught.value)
        assert (
            what in message
            and str(tmp_path / name) in message
            and "pass another FOLDER" in message
            and "\n" not in message
        )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (b"caf\xe9", "has a name that is not UTF-8: rename it"),
        (b"a\nb", "has a line break or control character in its name: rename it"),
        ("a\u2028b".encode(), "has a line break or control character in its name: rename it"),
        ("a\x9bb".encode(), "has a line break or control character in its name: rename it"),
    ],
)
def test_classes_whose_names_no_file_of_text_could_carry_are_refused_by_their_folder(
    tmp_path, name, reason
):
    make(
        tmp_path,
        *TRAIN,
        "train/a,b/1.png",
        "train/größe/1.png",
        "train/hot\u3000dog/1.png",
        "train/1/1.png",
        "train/.hidden/1.png",
    )
    # these are well
    assert scan(tmp_path)[0] == ["1", "a,b", "cat", "dog", "größe", "hot\u3000dog"]
    make(tmp_path, f"train/{os.fsdecode(name)}/1.png")
    with pytest.raises(ValueError) as caught:
        scan(tmp_path)
    folder = os.fsencode(tmp_path / "train") + b"/" + name
    assert str(caught.value) == f"the class folder {folder!r} {reason}"


def test_a_folder_next_to_the_splits_that_can_not_be_read_is_none_of_the_data(
    tmp_path, monkeypatch
):
    """For example lost+found, if the data set has its own disk."""
    make(tmp_path, *TRAIN, "lost+found/1.png")
    listed = os.scandir

    def forbidden(folder):
        if os.path.basename(folder) == "lost+found":
            raise PermissionError(13, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr(os, "scandir", forbidden)
    assert scan(tmp_path)[0] == ["cat", "dog"]


def test_a_folder_of_everything_names_a_few_of_its_folders(tmp_path):
    for number in range(300):
        (tmp_path / f"folder_{number:03}").mkdir()
    with pytest.raises(ValueError, match="'folder_007' and 292 more; supported are") as error:
        scan(tmp_path)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    ("folder", "mark"),
    [
        *(("runs", "runs"), ("fit", "fit"), ("cat/runs", "cat/runs")),
        *(("runs", "runs/fit"), ("runs", "runs/fit/version_0"), ("cat/runs", "cat/runs/fit")),
    ],
)
def test_marked_folders_of_runs_are_no_class(tmp_path, folder, mark):
    make(tmp_path, "cat/1.png", "dog/1.png", f"{folder}/fit/version_0/augmented.webp")
    num_before = len(scan(tmp_path)[1]["all"])
    make(tmp_path, f"{mark}/.finetune")
    names, files = scan(tmp_path)
    assert names == ["cat", "dog"] and len(files["all"]) == 2 == num_before - 1


def test_folders_are_left_out_where_they_are_asked_to(tmp_path):
    make(
        tmp_path,
        "train/cat/1.png",
        "train/dog/1.png",
        "train/results/",
        "val/cat/1.png",
        "val/dog/1.png",
        "old/1.png",
    )
    with pytest.raises(
        ValueError,
        match="has the split folders 'train' and 'val', and the class 'old' next to them",
    ):
        scan(tmp_path)
    hint = "where it is no class, delete the folder, or skip it with --data.exclude results$"
    with pytest.raises(ValueError, match=f"no images of the class 'results'.*; {hint}"):
        scan(tmp_path, changes=ClassChanges(["old"]))
    names, files = scan(tmp_path, changes=ClassChanges(["results", "old"]))
    assert names == ["cat", "dog"] and len(files["train"]) == len(files["val"]) == 2
    make(tmp_path, "val/results/1.png")
    # as a checkpoint knows them
    assert len(scan(tmp_path, names, changes=ClassChanges(["results", "old"]))[1]["val"]) == 2
    with pytest.raises(
        ValueError, match=r"class 'results', not in the training classes .*--data.exclude results$"
    ):
        (tmp_path / "train/results").rmdir()
        scan(tmp_path, changes=ClassChanges(["old"]))
    with pytest.raises(
        WrongUsage,
        match=r"--data.exclude: there is no class folder 'result'; did you mean 'results'\?",
    ):
        scan(tmp_path, changes=ClassChanges(["result", "old"]))
    make(tmp_path / "flat", "a/1.png", "b/1.png", "c/", "d/")
    with pytest.raises(
        ValueError, match=r"delete the folders, or skip them with --data.exclude '\[c, d\]'$"
    ):
        scan(tmp_path / "flat")


def test_a_folder_one_level_too_high_is_answered_with_the_right_one(tmp_path):
    make(
        tmp_path,
        "photos/photos/cat/1.png",
        "photos/photos/dog/1.png",
        "sets/one/train/a/1.png",
        "sets/one/train/b/1.png",
    )
    with pytest.raises(
        ValueError,
        match=f"only the class 'photos'.*; {tmp_path}/photos/photos holds 'cat', 'dog': pass that",
    ):
        scan(tmp_path / "photos")
    with pytest.raises(ValueError, match=f"; {tmp_path}/sets/one holds 'train': pass that folder"):
        scan(tmp_path / "sets")
    make(tmp_path / "nested", "cat/indoors/1.png", "dog/1.png")
    # control: it is a class with a folder in it
    with pytest.raises(ValueError, match="needs at least two$"):
        scan(tmp_path / "nested", changes=ClassChanges(["dog"]))
