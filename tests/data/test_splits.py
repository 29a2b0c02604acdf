"""Pictures set apart by name: in their share, by class, and unmoved by what is added, removed or renamed."""

import os
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from finetune.data.splits import hashes, stratified

FRACTIONS = [(0.1,), (0.5,), (0.9,), (0.1, 0.2), (0.3, 0.3)]


def numbered(*sizes: int) -> list[str]:
    return [f"{label}/{i:04d}.jpg" for label, size in enumerate(sizes) for i in range(size)]


def in_words(*sizes: int) -> list[str]:
    """Names that no number ends, as those of pictures from the web."""
    return [f"{label}/{i:04d} von Ä.jpg" for label, size in enumerate(sizes) for i in range(size)]


def labels_of(names: Sequence[str]) -> np.ndarray:
    return np.array([int(name.split("/")[0]) for name in names], np.int64)


def split(names: Sequence[str], fractions: Sequence[float], seed: int = 0) -> list[list[str]]:
    parts = stratified(names, labels_of(names), fractions, seed)
    assert len(parts) == len(fractions) + 1
    # disjoint and complete
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(names)))
    assert all(np.all(np.diff(part) > 0) and part.dtype.kind == "i" for part in parts)
    return [[names[i] for i in part] for part in parts]


def where(names: Sequence[str], fractions: Sequence[float], seed: int = 0) -> dict[str, int]:
    return {
        name: number for number, part in enumerate(split(names, fractions, seed)) for name in part
    }


@pytest.mark.parametrize("fractions", FRACTIONS)
@pytest.mark.parametrize("sizes", [(10, 10), (3, 100), (37, 5, 250), (1000, 1000)])
def test_each_part_holds_each_class_of_numbered_pictures_in_its_share(sizes, fractions):
    shuffled = np.random.default_rng(1).permutation(numbered(*sizes)).tolist()
    for seed in range(5):
        counts = np.array(
            [
                np.bincount(labels_of(part), minlength=len(sizes))
                for part in split(shuffled, fractions, seed)
            ]
        )
        assert counts.min() >= 1
        for count, fraction in zip(counts[1:], fractions, strict=True):
            # Multiples of the golden ratio stay within log2(n) / 2 of any arc's share for n up to some thousands.
            assert np.all(np.abs(count - fraction * np.array(sizes)) <= np.log2(sizes) / 2 + 1)


@pytest.mark.parametrize("fractions", FRACTIONS)
def test_other_names_get_their_share_as_by_lot(fractions):
    counts = np.array([len(part) for part in split(in_words(2000), fractions)])[1:]
    for count, fraction in zip(counts, fractions, strict=True):
        # four deviations
        assert abs(count - 2000 * fraction) < 4 * np.sqrt(2000 * fraction * (1 - fraction))


@pytest.mark.parametrize("make", [numbered, in_words])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_small_classes_serve_training_first(size, make):
    for seed in range(20):
        counts = [
            np.count_nonzero(labels_of(part) == 0)
            for part in split(make(size, 50), (0.1, 0.2), seed)
        ]
        assert sum(counts) == size and (np.array(counts[:size]) >= 1).all(), counts


def by_counting(
    names: Sequence[str], labels: np.ndarray, fractions: Sequence[float], seed: int
) -> list[np.ndarray]:
    """Control: exact fractions of each class, as they were drawn before."""
    parts: list[list[np.ndarray]] = [[] for _ in range(len(fractions) + 1)]
    for label in np.unique(labels):
        indices = np.random.default_rng((seed, int(label))).permutation(
            np.flatnonzero(labels == label)
        )
        for part, fraction in enumerate(fractions, 1):
            num = round(fraction * np.count_nonzero(labels == label))
            parts[part].append(indices[:num])
            indices = indices[num:]
        parts[0].append(indices)
    return [np.sort(np.concatenate(part)) for part in parts]


def num_moved(rule: Callable, make: Callable, seed: int) -> int:
    """Pictures that are elsewhere after one of each class was added, one removed, one renamed, one class added."""
    before = make(40, 100)
    after = [
        *before[1:90],
        "1/new.jpg",
        *before[91:],
        "0/0040.jpg",
        "1/0.jpg",
        *(f"2/{i}.jpg" for i in range(9)),
    ]
    found = []
    for names in before, after:
        parts = rule(names, labels_of(names), (0.1, 0.2), seed)
        found.append({names[i]: number for number, part in enumerate(parts) for i in part})
    return sum(found[1].get(name, part) != part for name, part in found[0].items())


@pytest.mark.parametrize("make", [numbered, in_words])
def test_what_is_added_removed_or_renamed_moves_no_other(make):
    assert [num_moved(stratified, make, seed) for seed in range(20)] == [0] * 20


def test_control_counted_off_parts_move():
    assert min(num_moved(by_counting, numbered, seed) for seed in range(20)) >= 10


def test_in_small_classes_one_more_picture_moves_no_more_than_one_for_each_part():
    moved = []
    for size in range(1, 12):
        for seed in range(40):
            before, after = (where(in_words(num), (0.1, 0.2), seed) for num in (size, size + 1))
            moved.append(sum(after[name] != part for name, part in before.items()))
    assert max(moved) <= 2 and np.mean(moved) < 0.35


def test_no_fraction_no_part():
    names = numbered(10, 10)
    rest, val, test = split(names, (0.0, 0.3))
    assert len(rest) + len(test) == 20 and not val and 5 <= len(test) <= 7
    rest, val, test = split(names, (0.3, 0.0))
    assert len(rest) + len(val) == 20 and not test
    assert [len(part) for part in stratified([], np.zeros(0, np.int64), (0.1,), 0)] == [0, 0]


def test_the_order_of_the_names_and_other_classes_do_not_matter():
    names = in_words(30, 30)
    alone = where(names[:30], (0.1, 0.2))
    assert {
        name: part for name, part in where(names[::-1], (0.1, 0.2)).items() if name in alone
    } == alone


def test_a_larger_test_part_leaves_validation_as_it_is():
    names = numbered(100, 100)
    assert split(names, (0.1, 0.2))[1] == split(names, (0.1, 0.4))[1] == split(names, (0.1,))[1]


def test_seeds_draw_other_parts():
    for make in numbered, in_words:
        parts = [
            frozenset(split(make(50, 50), (0.2,), seed)[1]) for seed in (*range(10), -1, 2**70)
        ]
        assert len(set(parts)) == len(parts)


def test_names_that_differ_have_hashes_that_differ():
    names = [
        "a/1.png",
        "a/01.png",
        "a/10.png",
        "a/1.jpg",
        "a/1",
        "b/1.png",
        "a/b.png",
        "a.b/c",
        "a/.1",
        "a/x1y.png",
    ]
    names += [
        "a/١.png",
        os.fsdecode(b"a/\xe9.png"),
        f"a/{'9' * 250}.png",
        "a/1/b.png",
        "a/2/b.png",
        "",
    ]
    found = hashes(names, 0)
    assert found.dtype == np.uint64 and len(set(found.tolist())) == len(names)
    assert hashes(names[::-1], 0).tolist() == found[::-1].tolist()
    # These are in checkpoints: another rule would no longer know the pictures of older runs.
    assert hashes(["cat/0001.jpg", "cat/a.jpg"], 0).tolist() == [
        11282211305212779367,
        17776586338081428655,
    ]
