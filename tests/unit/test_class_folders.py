"""Which files of a folder are images of which class and split; folders that will not do; paths for --data.predict."""

import os
import tempfile
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune import ImageFolderData
from finetune.data.data_set import DataSet
from finetune.data.datasets.scan import scan as scan_place
from finetune.data.faults import refuse_faults
from finetune.data.listing import ScanOptions
from finetune.data.prediction_paths import files_to_predict
from finetune.system.file_names import composed
from finetune.system.messages import WrongUsage


def make(root: Path, *names: str) -> Path:
    """Files of one byte each, because these tests decode no image; links as `link -> target`, folders as `name/`."""
    root.mkdir(parents=True, exist_ok=True)
    for name in names:
        link, _, target = name.partition(" -> ")
        (root / link).parent.mkdir(parents=True, exist_ok=True)
        if target:
            (root / link).symlink_to(target)
        elif name.endswith("/"):
            (root / name).mkdir()
        else:
            (root / name).write_bytes(b"x")
    return root


def scan(
    root: Path, class_names: list[str] | None = None, skip: bool = False, **changes
) -> DataSet:
    """The data set as a fit takes it."""
    data = scan_place(str(root), ScanOptions(**changes), class_names)
    refuse_faults(data.faults, skip)
    return data


def listed(data: DataSet) -> dict[str, int]:
    return dict(zip(data.names(), data.targets.labels.tolist(), strict=True))


NFC, NFD = "café", "cafe\u0301"
SPELLINGS = {
    "train": ["train", "Training", "TRAIN"],
    "val": ["val", "validation", "Valid", "dev"],
    "test": ["test", "testing", "TEST"],
}
# Names of images, and of files and folders that are none.
IMAGES = [
    "a.png",
    "B.JPG",
    "c.JpEg",
    "d.webp",
    "e.bmp",
    "f.tif",
    "g.TIFF",
    "h.gif",
    "10.png",
    "2.png",
]
IMAGES += ["deep/er/i.png", "j.k.png", "é.png", "e\u0301.jpg", "wörd/z.avif"]
OTHERS = [".hidden.png", "._a.png", ".cache/a.png", "readme.txt", "png", "a.svg", "deep/.x/y.png"]
OTHERS += ["runs/fit/version_0/augmented.webp"]


@st.composite
def layouts(draw) -> dict[str, dict[str, list[str]]]:
    """For each split ("" for class folders alone) and class folder the names of the images in it."""
    classes = draw(
        st.lists(
            st.sampled_from(["cat", "Dog", NFC, "a,b", "1"]), min_size=2, max_size=4, unique=True
        )
    )
    files = st.lists(st.sampled_from(IMAGES), min_size=1, unique=True)
    if draw(st.booleans()):
        return {"": {name: draw(files) for name in classes}}
    layout: dict[str, dict[str, list[str]]] = {}
    for split in draw(st.sampled_from([["train"], ["train", "val"], ["train", "val", "test"]])):
        form = draw(st.sampled_from(["NFC", "NFD"]))
        of_split = (
            classes
            if split == "train"
            else draw(st.lists(st.sampled_from(classes), min_size=1, unique=True))
        )
        names = [unicodedata.normalize(form, name) for name in of_split]
        layout[draw(st.sampled_from(SPELLINGS[split]))] = {name: draw(files) for name in names}
    return layout


@given(layout=layouts())
def test_a_folder_has_the_images_classes_and_splits_that_its_paths_say(layout):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for split, classes in layout.items():
            for name, files in classes.items():
                inside = root / split / name
                make(inside, *files, *OTHERS)
                (inside / "runs/fit/version_0/.finetune").touch()
        loose = next(iter(layout))
        make(root, ".git/x/a.png", *(["notes/x.txt", f"{loose}/loose.png"] if loose else []))
        data = scan(root)
        names = data.class_names
        assert names == sorted({composed(name) for name in next(iter(layout.values()))})
        assert len(data.splits) == len(layout) and data.has_splits == ("" not in layout)
        for spelled, classes in layout.items():
            split = next((kind for kind in SPELLINGS if spelled in SPELLINGS[kind]), "all")
            expected = []
            for label, name in sorted((names.index(composed(name)), name) for name in classes):
                paths = [(root / spelled / name / file).as_posix() for file in classes[name]]
                # in an order that does not depend on the Unicode composition of the file system
                paths.sort(key=lambda path: [(composed(part), part) for part in path.split("/")])
                expected += [(path, label) for path in paths]
            samples = data.splits[split]
            labels = samples.targets.labels
            assert [*zip(samples.paths, labels.tolist(), strict=True)] == expected
            assert labels.dtype == np.int64 and samples.targets.num_classes == len(names)
            assert [*samples.names()] == [str(Path(path).relative_to(root)) for path, _ in expected]


def test_a_class_may_be_called_as_a_split_is(tmp_path):
    """A folder that holds images, next to class folders, is a class: here vehicles."""
    make(tmp_path, "bus/1.png", "car/1.png", "train/1.png", "Test/1.png")
    data = scan(tmp_path)
    assert data.class_names == ["Test", "bus", "car", "train"] and list(data.splits) == ["all"]


def test_classes_are_matched_by_name_not_by_position(tmp_path):
    make(tmp_path, "train/ant/1.png", f"train/{NFD}/1.png", "train/z/1.png")
    make(tmp_path, "test/z/1.png", f"test/{NFC}/1.png")
    data = scan(tmp_path)
    assert data.class_names == ["ant", NFC, "z"]
    # by position: 0 and 1
    expected = {f"test/{NFC}/1.png": 1, "test/z/1.png": 2}
    assert expected.items() <= listed(data).items()
    (note,) = data.notes
    assert "'ant'" in note and "test has no images" in note
    # those of a checkpoint decide the order, stay as they are, and need neither images nor a training split
    known = ["z", NFD, "ant"]
    assert scan(tmp_path, known).class_names == known
    (tmp_path / "train").rename(tmp_path / "elsewhere")
    assert listed(scan(tmp_path, known)) == {f"test/{NFC}/1.png": 1, "test/z/1.png": 0}


def test_links_to_folders_are_followed_and_others_reported(tmp_path):
    make(tmp_path / "store", "1.png")
    make(tmp_path / "data", "dog/2.png", "cat -> ../store", "hen -> ../gone")
    with pytest.raises(ValueError, match="data/hen: the target of this link"):
        scan(tmp_path / "data")
    assert listed(scan(tmp_path / "data", skip=True)) == {"cat/1.png": 0, "dog/2.png": 1}
    make(tmp_path / "splits", *TRAIN, "val -> ../gone")
    with pytest.raises(ValueError, match="val: the target of this link"):
        scan(tmp_path / "splits")


TRAIN = ("train/cat/1.png", "train/dog/1.png", "train/dog/2.png")


def test_what_is_skipped_is_reported_in_a_line_a_kind(tmp_path, without_heic):
    make(tmp_path, *TRAIN, "train/cat/a.PSD", "train/dog/deep/b.psd", "train/dog/c.svg")
    make(tmp_path, "train/cat/d.heic", "train/cat/without", "train/cat/notes.txt", "3.png")
    make(tmp_path, "train/1.jpg", "train/2.jpg", "train/cat/Thumbs.db", "train/.DS_Store")
    make(tmp_path, "tests/cat/deep/1.png", "masks/readme.txt", "validate/cat/1.png")
    kinds, beside, loose, *unused = scan(tmp_path).notes
    assert all(word in kinds for word in (str(tmp_path), "2 .psd", "1 .svg", "1 without a suffix"))
    assert ".txt" not in kinds and ".db" not in kinds and "'.[heic]'" in kinds
    assert "1 image " in beside and beside.endswith(str(tmp_path))
    assert "2 images" in loose and str(tmp_path / "train") in loose
    for note, name in zip(unused, ["tests", "validate"], strict=True):
        assert str(tmp_path / name) in note and "not used" in note


def test_folders_that_cannot_be_read_are_named_or_skipped(tmp_path, monkeypatch):
    make(tmp_path, *TRAIN, "train/cat/secret/1.png", "train/dog/back -> ..", "lost+found/1.png")
    scandir = os.scandir

    def guarded(folder):  # for root may read all
        if Path(folder).name in ("secret", "lost+found"):
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", guarded)
    with pytest.raises(ValueError, match=r"train/cat/secret: Permission denied.*on_bad_image"):
        scan(tmp_path)
    data = scan(tmp_path, skip=True)
    assert set(listed(data)) == set(TRAIN)
    assert [Path(fault.where).name for fault in data.faults] == ["secret", "back"]


@pytest.mark.parametrize("mark", ["runs", "runs/fit", "runs/fit/version_0", "cat/runs/fit"])
def test_folders_of_runs_are_no_class(tmp_path, mark):
    folder = mark.partition("/fit")[0]
    make(tmp_path, "cat/1.png", "dog/1.png", f"{folder}/fit/version_0/augmented.webp")
    assert len(scan(tmp_path)) == 3
    make(tmp_path, f"{mark}/.finetune")
    data = scan(tmp_path)
    assert data.class_names == ["cat", "dog"] and len(data) == 2


def test_exclude_skips_class_folders_of_all_splits(tmp_path):
    make(tmp_path, *TRAIN, "train/results/", "val/cat/1.png", "val/dog/1.png", "old/1.png")
    with pytest.raises(ValueError, match=r"--data.exclude results"):
        scan(tmp_path, exclude=["old"])
    excluded = ["results", "old"]
    data = scan(tmp_path, exclude=excluded)
    assert data.class_names == ["cat", "dog"]
    assert len(data.splits["train"]) == 3 and len(data.splits["val"]) == 2
    make(tmp_path, "val/results/1.png")
    # as a checkpoint knows them
    assert len(scan(tmp_path, data.class_names, exclude=excluded).splits["val"]) == 2
    with pytest.raises(WrongUsage, match=r"'result'; did you mean 'results'"):
        scan(tmp_path, exclude=["result", "old"])
    make(tmp_path, "train/notes.txt")
    with pytest.raises(WrongUsage, match="'notes.txt'"):  # a file is no class
        scan(tmp_path, exclude=[*excluded, "notes.txt"])


# The files, the known classes, and what the message must name: what is wrong, where, and what to do.
ERRORS = {
    "unknown to the checkpoint": (TRAIN, ["cat", "cow"], ["'dog'", "cat, cow"]),
    "unknown in another case": ((*TRAIN, "test/Cat/1.png"), None, ["test", "'Cat' is 'cat'"]),
    "empty class": ((*TRAIN, "train/hen/", "train/ox/1.txt"), None, ["'hen', 'ox'", "'[hen, ox]'"]),
    "known classes, no image": (("cat/", "dog/1.txt"), ["cat", "dog"], ["'cat', 'dog'", ".jpg"]),
    "one class": (("train/cat/1.png",), None, ["'cat'", "at least two"]),
    "one class with folders": (("cat/in/1.png",), None, ["'cat'", "at least two"]),
    "one level too high": (("photos/cat/1.png", "photos/dog/1.png"), None, ["photos", "pass that"]),
    "two levels too high": (("a/train/cat/1.png",), None, ["holds 'train'", "pass that"]),
    "no class folders": (("train/1.png",), None, ["train", "put the images", "1 image lies loose"]),
    "val twice": ((*TRAIN, "val/cat/1.png", "valid/cat/1.png"), None, ["'val'", "'valid'"]),
    "train twice": ((*TRAIN, "Train/cat/1.png"), None, ["'train'", "'Train'", "keep one"]),
    "splits and classes": ((*TRAIN, "bus/1.png"), None, ["'train'", "'bus'", "move"]),
    "a link back": (
        (*TRAIN, "train/cat/back -> ../.."),
        None,
        ["cat/back", "link", "on_bad_image"],
    ),
    "a class twice": (TRAIN, ["dog", "cat", "dog"], ["class_names", "more than once"]),
    "a class in two forms": (TRAIN, ["dog", "cat", NFC, NFD], ["class_names", "more than once"]),
    "no training": (("test/cat/1.png", "val/cat/1.png"), None, ["test", "'train'"]),
    "a class that is no UTF-8": ((*TRAIN, "train/\udce9/1.png"), None, [r"\xe9", "rename"]),
    "a class of two lines": ((*TRAIN, "train/a\nb/1.png"), None, [r"a\nb", "rename"]),
    "many folders": ([f"folder_{i:03}/" for i in range(300)], None, ["'folder_007' and 292 more"]),
}


@pytest.mark.parametrize("case", ERRORS)
def test_folders_that_will_not_do_are_refused_in_a_line(tmp_path, case):
    names, class_names, words = ERRORS[case]
    with pytest.raises((ValueError, OSError)) as caught:
        scan(make(tmp_path / "data", *names), class_names)
    message = str(caught.value)
    assert str(tmp_path / "data") in message and "\n" not in message and len(message) < 600
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", ["", "a\x1b[2Jb", "a\nb"])
def test_class_names_are_names_and_reach_no_terminal(tmp_path, name):
    with pytest.raises(WrongUsage, match=r"data\.class_names.* '.*'") as caught:
        scan(make(tmp_path / "data", *TRAIN), ["dog", name])
    assert "\x1b" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_scan_returns_all_images_and_all_faults(tmp_path, monkeypatch):
    make(tmp_path, "train/a/1.jpg", "test/b/1.jpg", "train/loose.jpg", "train/c/")
    monkeypatch.chdir(tmp_path)
    for root in (".", str(tmp_path), f"{tmp_path}/", "../" + tmp_path.name):
        data = scan_place(root)
        assert data.class_names == ["a", "b", "c"]
        assert data.counts().tolist() == [[1, 0, 0], [0, 1, 0]]
        assert [data.name(i) for i in range(2)] == ["train/a/1.jpg", "test/b/1.jpg"]
        assert "1 image " in data.notes[0]
        empty, unknown = data.faults
        assert "'b'" in unknown.text and "'c'" in empty.text
        assert not unknown.can_skip and not empty.can_skip


# --data.predict


@pytest.fixture
def some(tmp_path, monkeypatch) -> Path:
    """The working folder, with four images, and lists of them."""
    make(tmp_path, "b/2.png", "a/ö.PNG", "a/1.png", "top.png", "notes.md", "runs/")
    lines = "\ufeffb/2.png\n\nnowhere.png\r\na/ö.PNG\nb/2.png\n".encode()
    (tmp_path / "list.txt").write_bytes(lines + b"caf\xe9.png\n")
    (tmp_path / "a/t.csv").write_text("path,label\n1.png,x\nö.PNG,\n1.png,y\n", "utf-8")
    (tmp_path / "own.csv").write_text("photo_of,path\ntop.png,x\n")
    (tmp_path / "runs/predictions.csv").write_text("path,class\na/1.png,x\nnowhere.png,\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


PATTERNS = {
    "top.png": ["top.png"],
    "notes.md": ["notes.md"],  # what a person names is tried; its row will say what is wrong
    ".": ["./a/1.png", "./a/ö.PNG", "./b/2.png", "./top.png"],
    "a": ["a/1.png", "a/ö.PNG"],
    "*/*.png": ["a/1.png", "b/2.png"],
    "**/*.png": ["a/1.png", "b/2.png", "top.png"],
    # as listed, twice too, with the mark that Windows puts first, and names that are no UTF-8
    "list.txt": ["b/2.png", "nowhere.png", "a/ö.PNG", "b/2.png", "caf\udce9.png"],
    "a/t.csv": ["a/1.png", "a/ö.PNG", "a/1.png"],  # relative to its folder
    "runs/predictions.csv": ["a/1.png", "nowhere.png"],  # the paths that were given
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_predict_takes_a_file_folder_glob_list_or_table(some, pattern):
    data = ImageFolderData(predict=pattern)
    assert list(data.splits) == ["predict"]
    assert list(data.splits["predict"].paths) == PATTERNS[pattern]
    assert (data.splits["predict"].targets.labels == -1).all()


def test_predict_takes_several_in_their_order(some):
    expected = ["b/2.png", "a/1.png", "a/ö.PNG", f"{some}/a/1.png"]
    assert list(files_to_predict(["b/2.png", "a", "~/a/*.png"])) == expected
    assert list(files_to_predict("own.csv", columns={"path": ["photo_of"]})) == ["top.png"]
    assert list(files_to_predict("own.csv", columns={"path": ["gone"]})) == ["x"]


@pytest.mark.parametrize(
    ("pattern", "content", "words"),
    [
        ("nowhere/*.png", None, "'nowhere/"),
        ("empty", "", "'empty'"),
        ("empty.txt", "\n \n", "'empty.txt'"),
        ("t.csv", "when\n1\n", "t.csv, line 1: .*'when'"),
        ("t.csv", "path\ntop.png\nhttps://x/y.png\n", "t.csv, line 3, column path"),
    ],
)
def test_predict_without_images_is_refused_in_a_line(some, pattern, content, words):
    if pattern == "empty":
        Path(pattern).mkdir()
    elif content is not None:
        Path(pattern).write_text(content)
    with pytest.raises((FileNotFoundError, ValueError), match=words) as caught:
        ImageFolderData(predict=["top.png", pattern]).read()
    assert "\n" not in str(caught.value)


def test_predict_reports_what_it_skips_once(some, monkeypatch, caplog, without_heic):
    make(some, "a/1.heic", "a/2.HEIC", "a/notes.txt", "only/1.heic", "a/back -> ..")
    with pytest.raises(ValueError, match=r"a/back: .*--data.on_bad_image skip"):
        ImageFolderData(predict="a").read()
    caplog.clear()
    for rank in ("1", "0"):  # the other processes say nothing
        monkeypatch.setenv("LOCAL_RANK", rank)
        data = ImageFolderData(predict=["a", "top.png"], on_bad_image="skip")
        assert list(data.splits["predict"].paths) == ["a/1.png", "a/ö.PNG", "top.png"]
    back, kinds = caplog.messages
    assert "a/back" in back and "2 .heic" in kinds and "'.[heic]'" in kinds
    with pytest.raises(FileNotFoundError, match="only.*heic"):
        files_to_predict("only", is_logged=False)
