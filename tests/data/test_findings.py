"""What groups of copies affect, and the order of findings."""

import itertools

import pytest

from finetune.data.checking.duplicates import Pair
from finetune.data.checking.findings import (
    Finding,
    duplicate_findings,
    shortcut_findings,
    worst_first,
)
from finetune.data.checking.shortcuts import Shortcut
from finetune.data.datasets.listing import list_images
from finetune.system.messages import counted


@pytest.fixture
def listing(tmp_path):
    """Images 0, 1: train/a; 2, 3: train/b; 4, 5: test/a; 6, 7: test/b."""
    for split in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(2):
                (tmp_path / split / name / f"{i}.jpg").touch()
    return list_images(tmp_path)


@pytest.mark.parametrize(
    ("members", "kind", "places"),
    [
        ([0, 1], "copies", "a in train"),
        ([0, 2], "two_classes", "a and b in train"),
        ([0, 4], "leak", "a in train and test"),
        ([0, 1, 2, 6], "leak", "a and b in train and test"),  # the test weighs more than the label
    ],
)
def test_a_set_is_named_by_the_worst_that_it_spoils(listing, members, kind, places):
    (exact,) = duplicate_findings(listing, [members], [])
    assert (
        exact.kind == f"{kind}_exact"
        and exact.rows[0].images == [*members]
        and exact.rows[0].note == places
    )
    near = [Pair(i, j, 0.9, False, 1.0) for i, j in itertools.pairwise(members)]
    (found,) = duplicate_findings(listing, [], near)
    assert found.kind == f"{kind}_near" and found.rows[0].images == [*members]
    assert found.level == exact.level == {"copies": "note"}.get(kind, "bad")


def test_equal_files_join_the_set_of_the_first_of_them(listing):
    found = duplicate_findings(
        listing, [[0, 1]], [Pair(0, 4, 0.8, True, 0.95), Pair(2, 6, 0.9, False, 1.0)]
    )
    assert [(f.kind, [row.images for row in f.rows]) for f in found] == [
        ("leak_near", [[2, 6], [0, 1, 4]]),  # the most alike first
        ("copies_exact", [[0, 1]]),
    ]
    assert (
        found[0].rows[1].note == "similarity 0.80, mirrored, cropped to 0.95; a in train and test"
    )


def test_the_worst_comes_first_and_rankings_last():
    kinds = [
        ("labels", "bad", False),
        ("a", "note", True),
        ("b", "bad", True),
        ("c", "warning", True),
        ("d", "bad", True),
    ]
    findings = [Finding(kind, level, "", "", [], is_judged) for kind, level, is_judged in kinds]
    assert [f.kind for f in worst_first(findings)] == ["b", "d", "c", "a", "labels"]


def test_shortcuts_are_described_by_what_they_give_away():
    found = shortcut_findings(
        [Shortcut("class", "a", "file type", 1.0), Shortcut("split", "test", "file size", 0.5)]
    )
    assert [(f.kind, f.level, len(f.rows)) for f in found] == [
        ("shortcut_class", "warning", 1),
        ("shortcut_split", "note", 1),
    ]
    assert found[0].rows[0].note == "file type distinguishes a from the rest: strength 1.00 of 1"
    assert shortcut_findings([]) == []


def test_numbers_are_written_for_people():
    assert [counted(n, "class", "classes") for n in (0, 1, 1200)] == [
        "0 classes",
        "1 class",
        "1,200 classes",
    ]
