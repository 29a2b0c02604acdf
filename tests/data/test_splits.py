"""Images held out by name: the right share, by class, and stable when others are added, removed or renamed."""

import os
from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
import pytest
from promise import control, promise

from finetune.data.datasets.image_folder import ImageFolderData
from finetune.data.splits import fold_parts, folds, group_ids, hashes, stratified, units_of

FRACTIONS = [(0.1,), (0.5,), (0.9,), (0.1, 0.2), (0.3, 0.3)]


def numbered(*sizes: int) -> list[str]:
    return [f"{label}/{i:04d}.jpg" for label, size in enumerate(sizes) for i in range(size)]


def in_words(*sizes: int) -> list[str]:
    """File names that end in no number, such as those of images from the web."""
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
def test_each_part_holds_each_class_of_numbered_images_in_its_share(sizes, fractions):
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
    """Number of images that change their split if one of each class is added, removed or renamed, or a class added."""
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


def test_in_small_classes_one_more_image_moves_no_more_than_one_for_each_part():
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
    # These are in checkpoints: another rule would no longer know the images of older runs.
    assert hashes(["cat/0001.jpg", "cat/a.jpg"], 0).tolist() == [
        11282211305212779367,
        17776586338081428655,
    ]


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


def part_by_group(parts: Sequence[np.ndarray], groups: np.ndarray) -> dict[int, int]:
    """The part of each group; an error if a group is in two parts."""
    found = [(int(group), number) for number, part in enumerate(parts) for group in groups[part]]
    assert len(dict(found)) == len(set(found)), "a group is in two parts"
    return dict(found)


@promise("groups")
@pytest.mark.parametrize("spelling", ["patient {}", "patient {} of Ä"])
@pytest.mark.parametrize("fractions", FRACTIONS)
def test_a_group_is_never_split_and_its_share_is_as_by_lot(fractions, spelling):
    names, labels, groups = patients(200, 400, spelling=spelling)
    for seed in range(5):
        parts = stratified(names, labels, fractions, seed, groups)
        part_of = part_by_group(parts, groups)
        counts = np.bincount(list(part_of.values()), minlength=len(fractions) + 1)
        for count, fraction in zip(counts[1:], fractions, strict=True):
            assert abs(count - 600 * fraction) < 4 * np.sqrt(600 * fraction * (1 - fraction))


@control("groups")
def test_control_without_groups_nearly_each_large_group_is_split():
    names, labels, groups = patients(200, 400)
    parts = stratified(names, labels, (0.3, 0.3), 0)
    pairs = {(int(group), number) for number, part in enumerate(parts) for group in groups[part]}
    assert len(pairs) > 600 + 200


@pytest.mark.parametrize("make", [numbered, in_words])
def test_groups_of_one_image_are_split_as_images(make):
    names = make(3, 60, 11)
    groups = group_ids(f"group {i * 7919}" for i in range(len(names)))
    for seed in range(5):
        plain = stratified(names, labels_of(names), (0.1, 0.2), seed)
        grouped = stratified(names, labels_of(names), (0.1, 0.2), seed, groups)
        assert [part.tolist() for part in plain] == [part.tolist() for part in grouped]
    # the control: with two images in one group, one of them may follow the other
    groups[1::2] = groups[::2][: len(groups[1::2])]
    differing = stratified(names, labels_of(names), (0.1, 0.2), 0, groups)
    assert [part.tolist() for part in plain] != [part.tolist() for part in differing]


@pytest.mark.parametrize("spelling", ["patient {}", "patient {} of Ä"])
def test_new_groups_move_no_old_ones(spelling):
    """Nor do new images of a group that has more than one image."""
    names, labels, groups = patients(40, 40, spelling=spelling)
    grown = f"0/{spelling.format(1)} 9 von Ä.jpg"
    new = [grown, *(f"1/new {i}.jpg" for i in range(9))]
    new_groups = group_ids([f"0 {spelling.format(1)}", *(f"new {i // 3}" for i in range(9))])
    all_names, all_groups = [*new, *names], np.concatenate([new_groups, groups])
    for seed in range(20):
        before = part_by_group(stratified(names, labels, (0.1, 0.2), seed, groups), groups)
        after = part_by_group(
            stratified(all_names, labels_of(all_names), (0.1, 0.2), seed, all_groups), all_groups
        )
        assert {group: after[group] for group in before} == before


def test_a_group_has_the_place_of_its_hash():
    """Computed with Python's integers: the hash of its name, turned by that of the empty name with the seed."""

    def hash_of(text: str, seed: bytes) -> int:
        head = text.rstrip("0123456789")
        key = {"digest_size": 8, "key": seed, "person": b"finetune split"}
        digest = blake2b(f"{head}\0{len(text)}\0".encode(), **key).digest()
        number = int(text.removeprefix(head) or 0)
        return int.from_bytes(digest, "little") + number * 0x9E3779B97F4A7C15

    groups = [f"patient {i} of Ä" for i in range(300)] + [f"tile {i}" for i in range(300)]
    names = [f"0/{group} {i}.jpg" for group in groups for i in range(2)]
    for seed in (0, 7):
        parts = stratified(
            names,
            labels_of(names),
            (0.1, 0.2),
            seed,
            group_ids(g for g in groups for _ in range(2)),
        )
        turn = hash_of("", str(seed).encode())
        places = [(hash_of(group, b"") + turn) % 2**64 / 2**64 for group in groups]
        expected = [1 if place < 0.1 else 2 if place < 0.1 + 0.2 else 0 for place in places]
        found = [0] * len(names)
        for number, part in enumerate(parts):
            for i in part:
                found[i] = number
        assert found[::2] == found[1::2] == expected


def test_numbered_groups_are_spread_evenly():
    """Their part deviates by a few groups from its share, where random places deviate by tens."""
    names = [f"0/{i}_{j}.jpg" for i in range(2000) for j in range(2)]
    groups = group_ids(f"patient {i}" for i in range(2000) for _ in range(2))
    for seed in range(5):
        counts = [
            len(part) / 2 for part in stratified(names, labels_of(names), (0.1, 0.2), seed, groups)
        ]
        # half of log2(2000), rounded up, and one, as for numbered images above
        assert abs(counts[1] - 200) <= 7 and abs(counts[2] - 400) <= 7


def test_each_part_gets_a_rare_class_that_shares_its_groups_with_a_frequent_one():
    """Each group of the rare class also has images of the frequent one."""
    names = [
        f"{label}/{i} {j}.jpg"
        for i in range(60)
        for j, label in enumerate((0, 0, 0, 1 if i < 3 else 0))
    ]
    groups = group_ids(f"{i} of {i}" for i in range(60) for _ in range(4))
    labels = labels_of(names)
    for seed in range(20):
        parts = stratified(names, labels, (0.1, 0.2), seed, groups)
        assert [np.count_nonzero(labels[part] == 1) for part in parts] == [1, 1, 1]
    # the control: the strata are those of the frequent class, and chance decides
    missing = [
        0
        in [
            np.count_nonzero(labels[part] == 1)
            for part in stratified(names, 0 * labels, (0.1, 0.2), seed, groups)
        ]
        for seed in range(20)
    ]
    assert any(missing)


@pytest.mark.parametrize("make", [numbered, in_words])
@pytest.mark.parametrize("num_folds", [2, 3, 5, 10])
def test_folds_test_each_image_once_in_equal_parts_of_each_class(num_folds, make):
    names = make(2, 37, 400)
    labels = labels_of(names)
    for seed in range(3):
        fold_of = folds(units_of(names, labels, seed, None), num_folds)
        tested = []
        for fold in range(1, num_folds + 1):
            train, val, test = fold_parts(units_of(names, labels, seed, None), fold, num_folds, 0.1)
            np.testing.assert_array_equal(
                np.sort(np.concatenate([train, val, test])), np.arange(len(names))
            )
            np.testing.assert_array_equal(test, np.flatnonzero(fold_of == fold))
            assert set(labels[train]) == {0, 1, 2} and len(val)
            tested += test.tolist()
            # as an independent draw; four deviations
            share = np.count_nonzero(labels[test] == 2) / 400
            assert abs(share - 1 / num_folds) < 4 * np.sqrt((1 - 1 / num_folds) / num_folds / 400)
        assert sorted(tested) == list(range(len(names)))


@pytest.mark.parametrize("has_groups", [False, True])
def test_each_of_several_labels_has_training_images(tmp_path, has_groups):
    """40 labels of 3 images in 60 images: the rarest label of an image says little about its others."""
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat(np.arange(40), 3)).reshape(60, 2)
    rows = ["path,label,group" if has_groups else "path,label"]
    for i, (first, second) in enumerate(labels.tolist()):
        (tmp_path / f"{i} von Ä.png").write_text(str(i))
        rows.append(f"{i} von Ä.png,l{first};l{second}" + (f",g{i // 2}" if has_groups else ""))
    (tmp_path / "table.csv").write_text("\n".join(rows), "utf-8")
    for seed in range(10):
        data = ImageFolderData(table=str(tmp_path / "table.csv"), split_seed=seed)
        assert data.label_kind == "several"
        assert data.splits["train"].targets.counts().min() > 0
        parts = [part.groups for part in data.splits.values() if part.groups is not None]
        assert sum(len(set(ids.tolist())) for ids in parts) == (30 if has_groups else 0)
        assert len(data.splits["train"]) < 60  # some are held out


@pytest.mark.parametrize(("num_classes", "size"), [(50, 4), (100, 3), (100, 2)])
def test_small_classes_leave_out_different_folds(tmp_path, num_classes, size):
    for label in range(num_classes):
        (tmp_path / f"class {label}").mkdir()
        for i in range(size):
            (tmp_path / f"class {label}/{i} von Ä.png").write_text(str((label, i)))
    tested = []
    for fold in range(1, 6):
        data = ImageFolderData(str(tmp_path), num_folds=5, fold=fold)
        data.check_can_train()
        tested.append(len(data.splits["test"]))
    share = num_classes * size / 5
    assert sum(tested) == 5 * share
    # a class is tested by a fold with probability p = size / 5; four deviations
    assert max(abs(num - share) for num in tested) < 4 * np.sqrt(share * (1 - size / 5))


def test_a_fold_validates_its_share_of_all_images():
    names = numbered(100, 100)
    for fold in range(1, 6):
        sizes = [
            len(part)
            for part in fold_parts(units_of(names, labels_of(names), 0, None), fold, 5, 0.1)
        ]
        assert abs(sizes[1] - 20) <= 4 and abs(sizes[2] - 40) <= 4


def test_folds_keep_groups_whole_and_new_groups_move_no_old_ones():
    names, labels, groups = patients(40, 40)
    more_names, more_labels, more_groups = patients(50, 45)
    for seed in range(5):
        fold_of = folds(units_of(names, labels, seed, groups), 5)
        before = part_by_group([np.flatnonzero(fold_of == k) for k in range(1, 6)], groups)
        more = folds(units_of(more_names, more_labels, seed, more_groups), 5)
        after = part_by_group([np.flatnonzero(more == k) for k in range(1, 6)], more_groups)
        assert {group: after[group] for group in before} == before
        part_by_group(fold_parts(units_of(names, labels, seed, groups), 2, 5, 0.1), groups)
