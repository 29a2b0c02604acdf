"""Images held out by name: a partition of whole groups, in the right share, stable when others come or go."""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_files import random_image
from promise import promise

from finetune import ImageFolderData
from finetune.data.data_set import DataSet
from finetune.data.drawn_splits import put_into_groups, straddling_groups, unequal_shares
from finetune.data.samples import PathList, Samples
from finetune.data.splits import (
    fold_parts,
    group_ids,
    hashes,
    stratified,
    units_of,
    with_each_label,
)
from finetune.data.targets import ClassIndex, MultiHot
from finetune.system.messages import WrongUsage

FRACTIONS = [(0.1,), (0.5,), (0.9,), (0.1, 0.2), (0.3, 0.3)]
SEEDS = st.integers(-(2**40), 2**40)


def numbered(*sizes: int) -> list[str]:
    return [f"{label}/{i:04d}.jpg" for label, size in enumerate(sizes) for i in range(size)]


def in_words(*sizes: int) -> list[str]:
    """File names that end in no number, such as those of images from the web."""
    return [f"{label}/{i:04d} von Ä.jpg" for label, size in enumerate(sizes) for i in range(size)]


def labels_of(names: Sequence[str]) -> np.ndarray:
    return np.array([int(name.split("/")[0]) for name in names], np.int64)


def split(names: Sequence[str], fractions: Sequence[float], seed: int = 0) -> list[list[str]]:
    return [
        [names[i] for i in part] for part in stratified(names, labels_of(names), fractions, seed)
    ]


def part_by_group(parts: Sequence[np.ndarray], groups: np.ndarray) -> dict[int, int]:
    """The part of each group; an error if a group is in two parts."""
    found = [(int(group), number) for number, part in enumerate(parts) for group in groups[part]]
    assert len(dict(found)) == len(set(found)), "a group is in two parts"
    return dict(found)


@st.composite
def image_sets(draw) -> tuple[list[str], np.ndarray | None]:
    """Names of images of some classes, numbered or not, and their groups: None, or of any size and classes."""
    make = draw(st.sampled_from([numbered, in_words]))
    names = draw(st.permutations(make(*draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)))))
    if draw(st.booleans()):
        return names, None
    numbers = st.integers(0, max(1, len(names) // draw(st.integers(1, 4))))
    owners = draw(st.lists(numbers, min_size=len(names), max_size=len(names)))
    return names, group_ids(f"patient {number}" for number in owners)


def place_images_by_their_number(monkeypatch):
    def numbered_hashes(names: Iterable[str], seed: int | None = None) -> np.ndarray:
        return np.arange(len(list(names)), dtype=np.uint64) * np.uint64(2**64 // 50)

    monkeypatch.setattr("finetune.data.splits.hashes", numbered_hashes)


@promise("groups", controls=[place_images_by_their_number])
@given(images=image_sets(), fractions=st.sampled_from(FRACTIONS), seed=SEEDS, data=st.data())
def test_a_split_is_a_partition_of_whole_groups_in_any_order(images, fractions, seed, data):
    names, groups = images
    labels = labels_of(names)
    parts = stratified(names, labels, fractions, seed, groups)
    assert len(parts) == len(fractions) + 1
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(names)))
    assert all(np.all(np.diff(part) > 0) and part.dtype.kind == "i" for part in parts)
    order = data.draw(st.permutations(range(len(names))))
    again = stratified(
        [names[i] for i in order],
        labels[order],
        fractions,
        seed,
        None if groups is None else groups[order],
    )
    assert [sorted(order[i] for i in part) for part in again] == [part.tolist() for part in parts]
    if groups is not None:
        part_by_group(parts, groups)
        return
    for label in np.unique(labels):  # small classes serve training first
        counts = np.array([np.count_nonzero(labels[part] == label) for part in parts])
        assert (counts[: counts.sum()] >= 1).all()


@promise("groups")
@given(images=image_sets(), num_folds=st.integers(2, 6), seed=SEEDS)
def test_folds_test_each_image_once_and_keep_groups_whole(images, num_folds, seed):
    names, groups = images
    units = units_of(names, labels_of(names), seed, groups)
    tested: list[int] = []
    for fold in range(1, num_folds + 1):
        parts = fold_parts(units, fold, num_folds, 0.1)
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(names)))
        tested += parts[2].tolist()
        if groups is not None:
            part_by_group(parts, groups)
    assert sorted(tested) == list(range(len(names)))


@pytest.mark.parametrize("fractions", FRACTIONS)
@pytest.mark.parametrize("sizes", [(10, 10), (3, 100), (37, 5, 250), (1000, 1000)])
def test_each_part_holds_each_class_of_numbered_images_in_its_share(sizes, fractions):
    names = np.random.default_rng(1).permutation(numbered(*sizes)).tolist()
    for seed in range(5):
        parts = split(names, fractions, seed)
        counts = np.array([np.bincount(labels_of(part), minlength=len(sizes)) for part in parts])
        assert counts.min() >= 1
        for count, fraction in zip(counts[1:], fractions, strict=True):
            # Multiples of the golden ratio stay within log2(n) / 2 of any arc's share for n up to some thousands.
            assert np.all(np.abs(count - fraction * np.array(sizes)) <= np.log2(sizes) / 2 + 1)


def patients(*sizes: int, spelling: str = "patient {}") -> tuple[list[str], np.ndarray, np.ndarray]:
    """Names, classes and groups of images. Every class has patients with one image and with five."""
    names: list[str] = []
    groups: list[str] = []
    for label, size in enumerate(sizes):
        for number in range(size):
            for i in range(1 + 4 * (number % 2)):
                names.append(f"{label}/{spelling.format(number)} {i} von Ä.jpg")
                groups.append(f"{label} {spelling.format(number)}")
    return names, labels_of(names), group_ids(groups)


@pytest.mark.parametrize("fractions", FRACTIONS)
def test_other_names_and_groups_get_their_share_as_by_lot(fractions):
    names, labels, groups = patients(200, 400)
    for seed in range(5):
        of_names = [len(part) for part in split(in_words(2000), fractions, seed)]
        part_of = part_by_group(stratified(names, labels, fractions, seed, groups), groups)
        of_groups = np.bincount(list(part_of.values()), minlength=len(fractions) + 1)
        for counts, num in (of_names, 2000), (of_groups, 600):
            for count, fraction in zip(counts[1:], fractions, strict=True):
                # four deviations
                assert abs(count - num * fraction) < 4 * np.sqrt(num * fraction * (1 - fraction))


def by_counting(
    names: Sequence[str], labels: np.ndarray, fractions: Sequence[float], seed: int
) -> list[np.ndarray]:
    """Control: exact fractions of each class, as they were drawn before."""
    parts: list[list[np.ndarray]] = [[] for _ in range(len(fractions) + 1)]
    for label in np.unique(labels):
        rng = np.random.default_rng((seed, int(label)))
        indices = rng.permutation(np.flatnonzero(labels == label))
        for part, fraction in enumerate(fractions, 1):
            num = round(fraction * np.count_nonzero(labels == label))
            parts[part].append(indices[:num])
            indices = indices[num:]
        parts[0].append(indices)
    return [np.sort(np.concatenate(part)) for part in parts]


def num_moved(rule: Callable, make: Callable, seed: int) -> int:
    """Number of images that change their split if one of each class is added, removed or renamed, or a class added."""
    before = make(40, 100)
    added = ["0/0040.jpg", "1/0.jpg", *(f"2/{i}.jpg" for i in range(9))]
    after = [*before[1:90], "1/new.jpg", *before[91:], *added]
    found = []
    for names in before, after:
        parts = rule(names, labels_of(names), (0.1, 0.2), seed)
        found.append({names[i]: number for number, part in enumerate(parts) for i in part})
    return sum(found[1].get(name, part) != part for name, part in found[0].items())


@pytest.mark.parametrize("make", [numbered, in_words])
def test_an_image_that_is_added_removed_or_renamed_moves_no_other(make):
    assert [num_moved(stratified, make, seed) for seed in range(20)] == [0] * 20


def test_control_counted_off_parts_move():
    assert min(num_moved(by_counting, numbered, seed) for seed in range(20)) >= 10


@pytest.mark.parametrize("spelling", ["patient {}", "patient {} of Ä"])
def test_new_groups_and_images_of_groups_move_no_old_ones(spelling):
    names, labels, groups = patients(40, 40, spelling=spelling)
    grown = f"0/{spelling.format(1)} 9 von Ä.jpg"
    new = [grown, *(f"1/new {i}.jpg" for i in range(9))]
    new_groups = group_ids([f"0 {spelling.format(1)}", *(f"new {i // 3}" for i in range(9))])
    all_names, all_groups = [*new, *names], np.concatenate([new_groups, groups])
    for seed in range(20):
        old = units_of(names, labels, seed, groups)
        more = units_of(all_names, labels_of(all_names), seed, all_groups)
        for rule in (
            lambda units: [fold_parts(units, fold, 5, 0.1)[2] for fold in range(1, 6)],
            lambda units: fold_parts(units, 2, 5, 0.1),
        ):
            before, after = part_by_group(rule(old), groups), part_by_group(rule(more), all_groups)
            assert {group: after[group] for group in before} == before
        before = part_by_group(stratified(names, labels, (0.1, 0.2), seed, groups), groups)
        parts = stratified(all_names, labels_of(all_names), (0.1, 0.2), seed, all_groups)
        after = part_by_group(parts, all_groups)
        assert {group: after[group] for group in before} == before


def test_a_fraction_of_none_and_a_larger_test_part_leave_validation_as_it_is():
    names = numbered(100, 100)
    assert split(names, (0.1, 0.2))[1] == split(names, (0.1, 0.4))[1] == split(names, (0.1,))[1]
    assert [len(part) for part in split(names, (0.0, 0.3))][1] == 0
    assert [len(part) for part in split(names, (0.3, 0.0))][2] == 0


def test_split_seeds_draw_other_parts():
    for make in numbered, in_words:
        seeds = (*range(10), -1, 2**70)
        parts = {frozenset(split(make(50, 50), (0.2,), seed)[1]) for seed in seeds}
        assert len(parts) == len(seeds)


def test_names_that_differ_have_hashes_that_differ():
    names = ["a/1.png", "a/01.png", "a/10.png", "a/1.jpg", "a/1", "b/1.png", "a/b.png", "a.b/c"]
    names += ["a/.1", "a/x1y.png", "a/١.png", os.fsdecode(b"a/\xe9.png"), f"a/{'9' * 250}.png"]
    names += ["a/1/b.png", "a/2/b.png", ""]
    found = hashes(names, 0)
    assert found.dtype == np.uint64 and len(set(found.tolist())) == len(names)
    assert hashes(names[::-1], 0).tolist() == found[::-1].tolist()
    # a copy on macOS may spell é as two characters
    assert hashes(["pêche/é 1.png"], 0) == hashes(["pe\u0302che/e\u0301 1.png"], 0)
    # These are in checkpoints: another rule would no longer know the images of older runs.
    expected = [11282211305212779367, 17776586338081428655]
    assert hashes(["cat/0001.jpg", "cat/a.jpg"], 0).tolist() == expected


@pytest.mark.parametrize("make", [numbered, in_words])
def test_groups_of_one_image_are_split_as_images(make):
    names = make(3, 60, 11)
    groups = group_ids(f"group {i * 7919}" for i in range(len(names)))
    for seed in range(5):
        plain = stratified(names, labels_of(names), (0.1, 0.2), seed)
        grouped = stratified(names, labels_of(names), (0.1, 0.2), seed, groups)
        assert [part.tolist() for part in plain] == [part.tolist() for part in grouped]
    # in a set with a larger group, too: only its images may move
    groups[4] = groups[3]
    plain = stratified(names, labels_of(names), (0.1, 0.2), 0)
    grouped = stratified(names, labels_of(names), (0.1, 0.2), 0, groups)
    for before, after in zip(plain, grouped, strict=True):
        assert set(before.tolist()) ^ set(after.tolist()) <= {3, 4}
    groups[1::2] = groups[::2][: len(groups[1::2])]  # the control
    grouped = stratified(names, labels_of(names), (0.1, 0.2), 0, groups)
    assert [part.tolist() for part in plain] != [part.tolist() for part in grouped]


def test_each_part_gets_a_rare_class_that_shares_its_groups_with_a_frequent_one():
    """Each group of the rare class also has images of the frequent one."""
    rows = [(i, j, int(i < 3 and j == 3)) for i in range(60) for j in range(4)]
    names = [f"{label}/{i} {j}.jpg" for i, j, label in rows]
    groups = group_ids(f"{i} of {i}" for i, _, _ in rows)
    labels = labels_of(names)

    def counts(strata: np.ndarray, seed: int) -> list[int]:
        parts = stratified(names, strata, (0.1, 0.2), seed, groups)
        return [np.count_nonzero(labels[part] == 1) for part in parts]

    assert [counts(labels, seed) for seed in range(20)] == [[1, 1, 1]] * 20
    # the control: the strata are those of the frequent class, and chance decides
    assert any(0 in counts(0 * labels, seed) for seed in range(20))


# Folds


@pytest.mark.parametrize("make", [numbered, in_words])
@pytest.mark.parametrize("num_folds", [2, 3, 5, 10])
def test_folds_hold_equal_parts_of_each_class_and_validate_their_share(num_folds, make):
    names = make(2, 37, 400)
    labels = labels_of(names)
    for seed in range(3):
        units = units_of(names, labels, seed, None)
        for fold in range(1, num_folds + 1):
            train, val, test = fold_parts(units, fold, num_folds, 0.1)
            assert set(labels[train]) == {0, 1, 2}
            # as an independent draw; four deviations
            share = np.count_nonzero(labels[test] == 2) / 400
            assert abs(share - 1 / num_folds) < 4 * np.sqrt((1 - 1 / num_folds) / num_folds / 400)
            assert abs(len(val) / len(names) - 0.1) < 4 * np.sqrt(0.09 / len(names))


@pytest.mark.parametrize(("num_classes", "size"), [(50, 4), (100, 3), (100, 2)])
def test_small_classes_leave_out_different_folds(num_classes, size):
    names = [f"class {label}/{i} von Ä.png" for label in range(num_classes) for i in range(size)]
    strata = np.repeat(hashes(f"class {label}" for label in range(num_classes)) >> 1, size)
    units = units_of(names, strata.astype(np.int64), 0, None)
    # a class is tested by a fold with probability p = size / 5; four deviations
    share = num_classes * size / 5
    sizes = np.array([len(fold_parts(units, fold, 5, 0.1)[2]) for fold in range(1, 6)])
    assert np.abs(sizes - share).max() < 4 * np.sqrt(share * (1 - size / 5))


def fold_of_each_image(root: Path, num_folds: int) -> dict[str, int]:
    """Return the fold that tests each image."""
    found: dict[str, int] = {}
    for fold in range(1, num_folds + 1):
        data = ImageFolderData(str(root), num_folds=num_folds, fold=fold)
        found |= {os.path.relpath(path, root): fold for path in data.splits["test"].paths}
    return found


def test_a_new_class_moves_no_image_of_a_small_class_to_another_fold(tmp_path):
    """The name of a class, and not its number, decides which folds it leaves out."""

    def add(name: str) -> None:
        (tmp_path / name).mkdir()
        for i in range(3):
            cv2.imwrite(str(tmp_path / name / f"{i} von Ä.png"), random_image(8 + i, 8))

    for number in range(9):
        add(f"class {number}")
    before = fold_of_each_image(tmp_path, 5)
    assert len(before) == 27
    add("a class before all others")
    after = fold_of_each_image(tmp_path, 5)
    assert {path: after[path] for path in before} == before


# Several labels


@st.composite
def label_sets(draw) -> np.ndarray:
    num, num_labels = draw(st.integers(1, 30)), draw(st.integers(1, 5))
    rows = st.lists(st.integers(0, 1), min_size=num_labels, max_size=num_labels)
    return np.array(draw(st.lists(rows, min_size=num, max_size=num)), np.uint8)


@given(labels=label_sets())
def test_the_stratum_of_several_labels_is_the_rarest_of_the_image(labels):
    strata = MultiHot(labels).strata()
    counts = labels.sum(axis=0)
    for row, stratum in zip(labels, strata.tolist(), strict=True):
        own = np.flatnonzero(row)
        # of equally rare labels the first; images without labels have their own
        assert stratum == (min(own, key=lambda k: (counts[k], k)) if len(own) else len(row))


@given(seed=SEEDS, has_groups=st.booleans())
def test_each_of_several_labels_has_training_images(seed, has_groups):
    """40 labels of 2 images in 40 images: the rarest label of an image says little about its others."""
    pairs = np.random.default_rng(0).permutation(np.repeat(np.arange(40), 2)).reshape(40, 2)
    labels = (pairs[..., None] == np.arange(40)).any(axis=1).astype(np.uint8)
    groups = group_ids(f"g{i // 2}" if has_groups else f"g{i}" for i in range(40))
    names = [f"{i} von Ä.png" for i in range(40)]
    parts = stratified(names, MultiHot(labels).strata(), (0.1, 0.2), seed, groups)
    parts = with_each_label(labels, groups, parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(40))
    part_by_group(parts, groups)
    assert labels[parts[0]].any(axis=0).all() and len(parts[0]) < 40


# --data.group_by


def groups_of(group_by: str, *names: str, split: str = "all") -> list[int]:
    """The number of each image's group, in the order of their first images."""
    has_splits = split != "all"
    names = tuple(f"{split}/{name}" for name in names) if has_splits else names
    paths = [f"/data/{name}" for name in names]
    labels = ClassIndex(np.zeros(len(names), np.int64), 1)
    data = DataSet([], {split: Samples(PathList(paths), labels, "/data")}, has_splits=has_splits)
    ids = put_into_groups(data, group_by).groups
    order = list(dict.fromkeys(ids.tolist()))
    return [order.index(group) for group in ids.tolist()]


def test_group_by_takes_the_first_capture_group_or_the_match_or_the_folder():
    names = ["cat/a1 x.png", "cat/a1 y.png", "dog/a1 x.png", "dog/b.png", "cat/b.png"]
    assert groups_of(r"(a\d) (\w)", *names) == [0, 0, 0, 1, 2]
    assert groups_of(r"a\d \w", *names) == [0, 1, 0, 2, 3]
    # the path begins at the class, whatever the split
    assert groups_of(r"^\w+/a\d", *names) == groups_of(r"^\w+/a\d", *names, split="test")
    assert groups_of(r"^\w+/a\d", *names) == [0, 0, 1, 2, 3]
    # neither an empty match nor a capture group without a match is a group
    assert groups_of(r"z*", *names) == groups_of(r"(z)?a", *names) == [0, 1, 2, 3, 4]
    nested = ["cat/p1/1.png", "dog/p1/2.png", "cat/s/p1/1.png", "cat/1.png", "cat/2.png"]
    assert groups_of("folder", *nested) == [0, 0, 1, 2, 3]


def test_group_by_and_a_column_of_groups_do_not_go_together():
    data = DataSet([], {"all": part(["a"])})
    with pytest.raises(WrongUsage, match="column of groups"):
        put_into_groups(data, "folder")
    assert put_into_groups(data, None) is data


def part(groups: list[str], is_drawn: bool = False) -> Samples:
    paths = [f"{group}/{i}.png" for i, group in enumerate(groups)]
    labels = ClassIndex(np.zeros(len(groups), np.int64), 1)
    return Samples(PathList(paths), labels, groups=group_ids(groups), is_drawn=is_drawn)


def test_a_group_in_given_train_and_test_folders_is_named():
    folders = {"train": part(["p1", "p1", "p2"]), "test": part(["p3", "p2"])}
    (line,) = straddling_groups(folders)
    assert "train" in line and "test" in line and "p2/2.png" in line and "p2/1.png" in line
    # the control
    assert list(straddling_groups({**folders, "test": part(["p3", "p4"])})) == []


def test_a_share_that_is_far_off_is_stated():
    def lines(has_splits: bool = False, **splits: Samples) -> list[str]:
        data = DataSet([], {"train": part(["a"] * 100), **splits}, has_splits=has_splits)
        return list(unequal_shares(data, {"val": 0.1, "test": 0.2}))

    val = part(["b"] * 12, is_drawn=True)
    (line,) = lines(val=val, test=part(["c"] * 90, is_drawn=True))
    assert line.startswith("test has 45%")
    assert lines(val=val, test=part(["c"] * 26, is_drawn=True)) == []
    # given folders are as they are
    assert lines(has_splits=True, val=part(["b"] * 90)) == []
    (line,) = lines(test=part(["c"] * 26, is_drawn=True))
    assert line.startswith("val has no images")
