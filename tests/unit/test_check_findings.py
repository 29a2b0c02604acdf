"""What `finetune check` and the first look of a fit find in files, folders, classes, series and shortcuts."""

import itertools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from data_files import real_data
from drawings import drawing, empty_png, facts_of, progressive
from PIL import Image

from finetune import ImageFolderData
from finetune.data.checking.checks import (
    class_findings,
    faulty_files,
    file_findings,
    first_look,
    scan_findings,
)
from finetune.data.checking.copies import Pair, duplicate_findings
from finetune.data.checking.findings import Finding, as_plain
from finetune.data.checking.image_facts import (
    SIDE,
    collect_facts,
    inspect_image,
    inspect_images,
    small_copy,
)
from finetune.data.checking.series import series_findings
from finetune.data.checking.shortcuts import shortcut_findings, strengths
from finetune.data.data_set import DataSet
from finetune.data.datasets.scan import scan
from finetune.data.drawn_splits import put_into_groups
from finetune.data.samples import PathList, Samples
from finetune.data.targets import ClassIndex

# Files


def test_files_that_cannot_be_read_are_named_in_words_and_take_no_memory(tmp_path):
    drawing(0).save(tmp_path / "fine.jpg")
    contents = {
        "bomb.png": (empty_png(70_000, 70_000), "limit of 178956970"),
        "empty.jpg": (b"", "is empty"),
        "page.jpg": (b"<html>", "not an image"),
        "cut.jpg": ((tmp_path / "fine.jpg").read_bytes()[:2000], "truncated"),
        "slow.jpg": (progressive(200), "100 scans"),
    }
    for name, (content, _) in contents.items():
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "pipe.jpg")
    words = {name: word for name, (_, word) in contents.items()}
    words |= {"gone.png": "No such file", "pipe.jpg": "pipe", "fine.jpg": ""}
    paths = [str(tmp_path / name) for name in words]
    facts = collect_facts(inspect_images(paths), len(paths))
    assert all(word in e for word, e in zip(words.values(), facts.errors, strict=True)), (
        facts.errors
    )
    assert facts.is_readable.tolist() == [not word for word in words.values()]
    assert facts.aspects[-1] == pytest.approx(300 / 220) and facts.brightness[-1] > 0
    assert [small_copy(path, 144) is None for path in paths] == (~facts.is_readable).tolist()


def test_an_image_is_looked_at_upright(tmp_path):
    suffix = "jpg"
    sizes, paths = [], {n: str(tmp_path / f"{n}.{suffix}") for n in (1, 3, 6)}
    for orientation, path in paths.items():
        tags = Image.Exif()
        tags[0x0112] = orientation
        drawing(0, 400, 300).save(path, exif=tags)
        sizes.append(tuple(inspect_image(path).sizes[0].tolist()))
    assert sizes == [(300, 400), (300, 400), (400, 300)]
    drawing(0, 400, 300).rotate(-90, expand=True).save(tmp_path / f"b.{suffix}")
    grey = [
        inspect_image(path).grey[0].astype(int)
        for path in (paths[6], str(tmp_path / f"b.{suffix}"))
    ]
    assert np.abs(grey[0] - grey[1]).mean() < 2
    shown = small_copy(paths[6], 100)
    assert shown.shape[0] > shown.shape[1] >= 100


# Classes, folders and files of a data set


def rows(findings) -> dict[str, list[str]]:
    return {finding.kind: [row.note for row in finding.rows] for finding in findings}


@pytest.fixture
def folder(tmp_path):
    """Makes a data set with a number of empty image files for each split and class."""

    def make(**splits: dict[str, int]):
        for split, classes in splits.items():
            for name, num in classes.items():
                (tmp_path / split / name).mkdir(parents=True)
                for i in range(num):
                    (tmp_path / split / name / f"{i}.jpg").touch()
        return scan(str(tmp_path))

    return make


# The number of images by split and class, and what is found.
TRAIN = {"Hot Dog": 60, "hot_dog": 12, "few": 3, "empty": 0, "lone": 20}
CLASSES = {
    "even": ({"train": {"a": 12, "b": 14}, "test": {"a": 12, "b": 14}}, {}),
    "doubtful": (
        {"train": TRAIN, "test": {**TRAIN, "few": 0}},
        {
            "alike_names": ["'Hot Dog' and 'hot_dog'"],
            "one_split": ["few is not in test"],
            "tiny_class": ["few: 3 images"],
            "unequal_classes": ["Hot Dog: 60"],
        },
    ),
    "other scripts": ({"train": {"犬": 12, "猫": 12, "+": 12, "-": 12}}, {}),
}


@pytest.mark.parametrize("case", CLASSES)
def test_doubtful_classes_are_named_and_sound_ones_are_not(folder, case):
    classes, wanted = CLASSES[case]
    found = rows(class_findings(folder(**classes)))
    for kind, notes in wanted.items():
        assert found[kind][0].startswith(notes[0]), found
    assert found.keys() - wanted.keys() == set()


def test_files_that_are_no_images_of_a_class_are_named(folder, tmp_path):
    data = folder(train={"a": 1, "c": 1})
    (tmp_path / "train/b").mkdir()
    for name in ("loose.jpg", "a/x.psd", "a/y.psd", "a/z.SVG", "a/noted.txt"):
        (tmp_path / "train" / name).touch()
    (tmp_path / "train/gone").symlink_to("nowhere")
    found = rows(scan_findings(scan(str(tmp_path))))
    lines = "\n".join(found["notes"])
    for words in ("1 image outside of class folders", "2 .psd, 1 .svg"):
        assert words in lines
    for words in ("'b'", "gone: the target"):
        assert any(words in row for row in found["faults"])
    assert rows(scan_findings(data)) == {}


def test_what_most_files_are_is_not_odd():
    grey = np.random.default_rng(0).integers(0, 256, (4, 48, 48)).astype(np.uint8)
    assert rows(file_findings(facts_of(grey, modes=["RGBA"] * 3 + ["L"]))) == {}
    half = rows(file_findings(facts_of(grey, modes=["RGBA"] * 2 + ["L"] * 2)))
    assert half["odd_mode"] == ["RGBA"] * 2


# Copies. Images 0, 1: train/a; 2, 3: train/b; 4, 5: test/a; 6, 7: test/b.


@pytest.mark.parametrize(
    ("members", "kind", "places"),
    [
        ([0, 1], "copies", "a in train"),
        ([0, 4], "leak", "a in train and test"),
        ([0, 1, 2, 6], "leak", "a and b in train and test"),  # the test weighs more than the label
    ],
)
def test_a_set_of_copies_is_named_by_the_worst_that_it_spoils(folder, members, kind, places):
    data = folder(train={"a": 2, "b": 2}, test={"a": 2, "b": 2})
    (exact,) = duplicate_findings(data, [members], [])
    assert exact.kind == f"{kind}_exact" and exact.rows[0].images == members
    assert exact.rows[0].note == places
    near = [Pair(i, j, 0.9, False, 1.0) for i, j in itertools.pairwise(members)]
    (found,) = duplicate_findings(data, [], near)
    assert found.kind == f"{kind}_near" and found.rows[0].images == members
    assert found.level == exact.level == {"copies": "note"}.get(kind, "bad")


# Shortcuts


def test_chance_has_no_strength_and_a_rule_without_errors_has_one():
    """Guessing is right for half of the N images of each side, with a deviation of 0.5 / sqrt(N): six of them."""
    num = 4000
    for seed in range(5):
        labels, cells = np.random.default_rng(seed + 1).integers(0, (2, 12), (num, 2)).T
        assert strengths(cells, labels, 2).max() < 6 * 0.5 / np.sqrt(num / 2) * 2
    assert strengths(labels + 3, labels, 2).tolist() == [1, 1]
    for num, strength in ((19, 0), (20, 1)):  # of few images nothing is reported
        labels = np.repeat([0, 1], [num, 400])
        assert strengths(labels, labels, 2).tolist() == [strength, strength]


def test_a_planted_property_is_named_and_no_other():
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], 60)
    grey = rng.integers(0, 256, (180, 48, 48)).astype(np.uint8)
    sizes = rng.integers(100, 200, (180, 2))
    facts = facts_of(grey, num_bytes=rng.integers(4000, 6000, 180), sizes=sizes)
    everything = np.arange(180)
    assert not [*shortcut_findings(facts, everything, "class", labels, "abc")]  # the control
    facts.kinds[60:120] = ["PNG"] * 60
    (finding,) = shortcut_findings(facts, everything, "class", labels, "abc")
    assert finding.kind == "shortcut_class" and finding.level == "warning"
    (row,) = finding.rows
    assert row.note.startswith("file type distinguishes b") and row.value == 1
    # of two classes the second says the same again
    (finding,) = shortcut_findings(facts, np.arange(120), "class", labels, "ab")
    assert len(finding.rows) == 1
    assert not [*shortcut_findings(facts, np.arange(0), "class", labels, "abc")]
    (finding,) = shortcut_findings(facts, everything, "split", labels, "abc")
    assert (finding.kind, finding.level) == ("shortcut_split", "note")


def test_shortcuts_of_thousands_of_classes_take_no_time():
    labels = np.arange(60_000) % 3000
    facts = facts_of(np.zeros((60_000, 1, 1), np.uint8), num_bytes=labels)
    names = [str(i) for i in range(3000)]
    (found,) = shortcut_findings(facts, np.arange(60_000), "class", labels, names)
    assert all("file size" in row.note or "bytes for" in row.note for row in found.rows)


# Series


BURSTS = [f"{name}/burst{k}_{i:03d}.jpg" for name in "ab" for k in range(12) for i in range(5)]
FOLDERS = [f"{name}/v{k}/{i:03d}.jpg" for name in "ab" for k in range(12) for i in range(5)]
FRAMES = [f"{name}/{i:04d}.jpg" for name in "ab" for i in range(60)]


def series(root: Path, names: list[str], is_series: bool) -> list[Finding]:
    """The findings about files of these names; scenes of five images each, or images that have nothing in common."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    data = scan(str(root))
    rng = np.random.default_rng(0)
    scenes = rng.normal(size=(len(names), SIDE, SIDE))
    places = {str(root / name): i for i, name in enumerate(names)}
    order = np.array([places[path] for path in data.paths])
    scene = scenes[order // 5 if is_series else order]
    grey = 128 + 40 * (scene + 0.5 * rng.normal(size=scene.shape))
    facts = facts_of(grey.clip(0, 255).astype(np.uint8))
    return list(series_findings(data, facts, np.arange(len(names))))


@pytest.mark.parametrize(
    ("names", "option"),
    [
        (BURSTS, r"--data.group_by '([^/]*?)\d+\.\w+$' keeps"),
        (FOLDERS, "--data.group_by folder"),
        (FRAMES, "a folder of its own"),
    ],
)
def test_series_that_a_random_split_would_tear_apart_are_found(tmp_path, names, option):
    (finding,) = series(tmp_path / "series", names, is_series=True)
    assert finding.kind == "series" and finding.level == "warning"
    num = len({name.rstrip("0123456789.jpg") for name in names})
    assert finding.title.startswith(f"{num} series") and option in finding.advice and finding.rows
    # control: numbers alone are no evidence
    assert series(tmp_path / "others", names, is_series=False) == []
    if names == BURSTS:  # the option that is advised makes these groups
        pattern = finding.advice.partition("'")[2].partition("'")[0]
        labels = ClassIndex(np.zeros(len(names), np.int64), 1)
        samples = Samples(PathList(f"/d/{name}" for name in names), labels, folder="/d")
        groups = put_into_groups(DataSet(["a"], {"all": samples}), pattern).groups.tolist()
        prefixes = [name.split("/")[1].split("_")[0] for name in names]
        assert len({*zip(groups, prefixes, strict=True)}) == len({*groups}) == len({*prefixes})


def test_series_in_given_splits_are_found_only_where_they_straddle(tmp_path):
    def in_splits(is_test: list[bool]) -> list[str]:
        pairs = zip(is_test, BURSTS, strict=True)
        return [f"{'test' if test else 'train'}/{name}" for test, name in pairs]

    torn = in_splits([i % 5 == 2 for i in range(len(BURSTS))])
    (finding,) = series(tmp_path / "torn", torn, is_series=True)
    assert "24 series" in finding.title and "more than one split" in finding.title
    whole = in_splits([i // 5 % 4 == 0 for i in range(len(BURSTS))])
    assert series(tmp_path / "whole", whole, is_series=True) == []
    # each split is numbered from one: equal numbers are other images
    again = [f"{split}/{name}" for split in ("train", "test") for name in FRAMES]
    assert series(tmp_path / "again", again, is_series=True) == []


@pytest.mark.slow
@pytest.mark.real
def test_real_photographs_numbered_in_any_order_are_no_series():
    data = scan(str(real_data("hotdog")))
    num = len(data.paths)
    facts = collect_facts(inspect_images(data.paths), num)
    assert list(series_findings(data, facts, np.arange(num))) == []


# The first look of a fit


@pytest.fixture
def photos(colours, tmp_path) -> Path:
    return Path(shutil.copytree(colours, tmp_path / "colours"))


def look(folder: Path):
    data = ImageFolderData(str(folder), on_bad_image="skip").scanned
    return faulty_files(data, findings := first_look(data)), as_plain(findings, data, 5)


def test_a_fit_says_nothing_about_a_sound_set(photos):
    first, second = sorted((photos / "train").glob("*/*"))[:2]
    shutil.copy(first, second)  # in one split, which spoils no test
    assert look(photos) == ("", [])


def test_a_fit_names_copies_across_splits_and_files_that_are_no_images(photos):
    train, test = (sorted((photos / split).glob("*/*")) for split in ("train", "test"))
    shutil.copy(train[0], test[3])
    for path in train[1:15]:
        path.write_bytes(b"<html>" if path != train[1] else b"")
    (photos / "train/blue" / os.fsdecode(b"caf\xe9\n.png")).write_bytes(b"broken")
    text, (leak, broken) = look(photos)
    assert "2 are in two splits" in text and str(test[3]) in text
    assert "15 cannot be read" in text and f"finetune check {photos}" in text
    assert len(text.splitlines()) == 1
    assert (leak["kind"], broken["kind"]) == ("leak_exact", "unreadable")
    copies = (train[0], test[3])
    assert sorted(leak["rows"][0]["files"]) == sorted(str(p.relative_to(photos)) for p in copies)
    assert len(broken["rows"]) == 5 and "the file is empty" in broken["rows"][0]["note"]
    json.dumps([leak, broken])
