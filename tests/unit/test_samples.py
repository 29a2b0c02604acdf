"""The rows of a split: paths, targets, names, groups, and images that are read from files or a cache."""

import os
import pickle
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from finetune.data.decode import DecodeError, decode
from finetune.data.memmap import MemmapImages, write_memmap
from finetune.data.samples import CachedImages, PathList, Samples
from finetune.data.splits import group_ids
from finetune.data.targets import ClassIndex, MultiHot

# Bytes that are no UTF-8 are held as surrogates.
NAMES = st.text(st.characters(exclude_categories=["Cs"])) | st.binary().map(os.fsdecode)


@given(names=st.lists(NAMES, max_size=12), times=st.sampled_from([1, 1000]))
@example(names=["a.png", "", "größe.jpg", "ホットドッグ.png", "\udce9.png", "and\nline"], times=1)
def test_a_list_of_paths_gives_back_its_paths(names, times):
    names = names * times  # also more than the block that is decoded at once
    paths = PathList(iter(names))
    assert len(paths) == len(names) and list(paths) == names
    assert [paths[i] for i in range(min(9, len(paths)))] == names[:9]
    assert paths[2:5] == names[2:5] and paths[::-1] == names[::-1]
    assert list(pickle.loads(pickle.dumps(paths))) == names  # for spawned workers
    for wrong in (len(names), -1):
        with pytest.raises(IndexError):
            paths[wrong]
    rows = np.random.default_rng(0).permutation(len(names))[: 2 * len(names) // 3]
    assert list(paths.take(rows)) == [names[row] for row in rows]
    assert list(PathList.joined([paths, paths.take(rows[:0]), paths])) == 2 * names


def test_a_list_of_paths_needs_eight_bytes_a_path_more_than_its_letters():
    paths = [f"train/hotdog/{i:06d}.jpg" for i in range(10_000)]
    # No Python object per path, whose reference count would copy the page in every forked worker.
    arrays = list(vars(PathList(paths)).values())
    assert all(isinstance(array, np.ndarray) and array.dtype.kind in "iu" for array in arrays)
    assert sum(array.nbytes for array in arrays) == sum(map(len, paths)) + 8 * (len(paths) + 1)


ONE = ClassIndex(np.array([2, 0, 2, 2, -1], np.int64), num_classes=4)
SEVERAL = MultiHot(np.array([[1, 0, 1], [1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 0, 1]], np.uint8))


@pytest.mark.parametrize(
    ("targets", "counts", "batch"),
    [(ONE, [1, 0, 3, 0], [2, 0]), (SEVERAL, [4, 1, 2], [[1, 0, 0], [1, 1, 0]])],
)
def test_targets_of_one_and_of_several_labels(targets, counts, batch):
    assert targets.counts().tolist() == counts == targets.weighted_counts(np.ones(5)).tolist()
    assert targets.counts().dtype == np.int64 and len(targets) == 5
    assert targets.num_classes == len(counts) and (targets.strata() == ONE.labels).all() == (
        targets is ONE
    )
    collated = targets.collate(targets[i] for i in (3, 1))
    assert collated.tolist() == batch
    assert collated.dtype == (np.int64 if targets is ONE else np.float32)
    assert targets.collate([]).shape == (0, *collated.shape[1:])
    taken = targets.take(np.array([3, 1]))
    assert taken.labels.tolist() == batch and taken.num_classes == len(counts)
    assert targets.take(np.arange(0)).counts().tolist() == [0] * len(counts)
    with pytest.raises(IndexError):
        targets[5]
    # the fingerprint is that of the labels in their order, also of a view
    backwards = targets.take(np.arange(5)[::-1])
    view = replace(targets, labels=targets.labels[::-1])
    assert backwards.fingerprint() == view.fingerprint() != targets.fingerprint()


@pytest.fixture
def samples(tmp_path: Path) -> Samples:
    """Four images of three classes, each of one grey of its own, reduced to 20 pixels."""
    for i in range(4):
        folder = tmp_path / "train" / f"class {i % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / f"{i}.png"), np.full((40, 60, 3), 10 * i, np.uint8))
    paths = sorted(map(str, tmp_path.rglob("*.png")))
    labels = np.array([int(Path(path).parent.name[-1]) for path in paths])
    return Samples(
        PathList(paths), ClassIndex(labels, 3), str(tmp_path / "train"), 20, is_drawn=True
    )


def cached(samples: Samples, path: Path, lacks: int | None = None) -> Samples:
    """The same images from a cache in another order, which holds one grey level more than the files."""
    num = len(samples)
    images = [None if i == lacks else samples.read(i) + 1 for i in reversed(range(num))]
    write_memmap(path, iter(images), {}, 1e9)
    return replace(samples, cached=CachedImages(MemmapImages(path), np.arange(num)[::-1]))


@pytest.mark.parametrize("rows", [[3, 0, 2], [0, 2, 3], []])
def test_rows_that_are_taken_keep_all_that_belongs_to_them(samples, tmp_path, rows):
    groups = group_ids(["patient 1", "patient 2", "patient 1", "patient 3"])
    table = replace(cached(samples, tmp_path / "cache"), groups=groups, weights=np.arange(4.0))
    taken = table.take(np.array(rows, int))
    assert list(taken.paths) == [table.paths[row] for row in rows]
    assert taken.groups.tolist() == groups[rows].tolist() and taken.weights.tolist() == rows
    assert taken.targets.labels.tolist() == table.targets.labels[rows].tolist()
    assert taken.hashes().tolist() == table.hashes()[rows].tolist()
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(taken.read(i), table.read(row))
    assert (taken.is_drawn, taken.folder, taken.shorter_side) == (True, samples.folder, 20)
    assert samples.take(np.array(rows, int)).groups is None


def test_names_do_not_depend_on_the_place_of_the_folder(samples):
    assert next(iter(samples.names())) == "class 0/0.png"
    paths = PathList(path.replace(samples.folder, "/elsewhere") for path in samples.paths)
    moved = replace(samples, paths=paths, folder="/elsewhere")
    assert (moved.hashes() == samples.hashes()).all()


def test_images_are_read_from_files_or_a_cache(samples, tmp_path):
    np.testing.assert_array_equal(samples.read(1), decode(samples.paths[1], shorter_side=20))
    assert samples.read(1).shape == (20, 30, 3)
    table = cached(samples, tmp_path / "cache", lacks=2)
    np.testing.assert_array_equal(table.read(1), samples.read(1) + 1)
    # not in the cache: read again
    np.testing.assert_array_equal(table.read(2), samples.read(2))
    Path(samples.paths[2]).write_bytes(b"broken")
    with pytest.raises(DecodeError, match="class .*png"):
        table.read(2)
