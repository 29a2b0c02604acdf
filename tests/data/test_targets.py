"""The targets of images: one class each, or several labels."""

import numpy as np
import pytest

from finetune.data.splits import stratified
from finetune.data.targets import ClassIndex, MultiHot

LABELS = np.array([2, 0, 2, 2, -1], np.int64)


def test_counts_are_by_class_without_unknown_ones():
    targets = ClassIndex(LABELS, num_classes=4)
    assert targets.counts().tolist() == [1, 0, 3, 0] and len(targets) == 5
    assert targets.weighted_counts(np.ones(5)).tolist() == [1, 0, 3, 0]
    assert ClassIndex(LABELS[:0], 2).counts().tolist() == [0, 0]


def test_rows_and_batches():
    targets = ClassIndex(LABELS, 4)
    taken = targets.take(np.array([1, 0]))
    assert taken.labels.tolist() == [0, 2] and taken.num_classes == 4
    batch = ClassIndex.collate(targets[i] for i in (3, 1))
    assert batch.tolist() == [2, 0] and batch.dtype == np.int64
    assert ClassIndex.collate([]).shape == (0,) and type(targets[0]) is int
    with pytest.raises(IndexError):
        targets[5]


def test_a_fingerprint_is_that_of_the_labels_in_their_order():
    fingerprint = ClassIndex(LABELS, 4).fingerprint()
    assert fingerprint == LABELS.tobytes()
    assert ClassIndex(LABELS[::-1].copy(), 4).fingerprint() != fingerprint


def test_a_stratum_is_a_class():
    assert ClassIndex(LABELS, 4).strata().tolist() == LABELS.tolist()


SEVERAL = np.array([[1, 0, 1], [1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 0, 1]], np.uint8)


def test_images_count_for_each_of_their_labels():
    targets = MultiHot(SEVERAL)
    assert targets.counts().tolist() == [4, 1, 2] and len(targets) == 5
    assert targets.num_classes == 3 and targets.counts().dtype == np.int64
    assert MultiHot(SEVERAL[:0]).counts().tolist() == [0, 0, 0]


def test_rows_and_batches_of_several_labels():
    targets = MultiHot(SEVERAL)
    assert targets.take(np.array([2, 1])).labels.tolist() == [[0, 0, 0], [1, 1, 0]]
    batch = targets.collate(targets[i] for i in (1, 2))
    assert batch.tolist() == [[1, 1, 0], [0, 0, 0]] and batch.dtype == np.float32
    empty = targets.collate([])
    assert empty.shape == (0, 3) and empty.dtype == np.float32
    with pytest.raises(IndexError):
        targets[5]


def test_a_stratum_is_the_rarest_label_and_images_without_labels_have_their_own():
    assert MultiHot(SEVERAL).strata().tolist() == [2, 1, 3, 0, 2]
    # of equally rare labels it is the first
    assert MultiHot(SEVERAL[:2]).strata().tolist() == [2, 1]
    assert MultiHot(SEVERAL[:1]).strata().tolist() == [0]


def test_strata_give_rare_labels_their_share_of_each_split():
    rng = np.random.default_rng(0)
    labels = (rng.random((2000, 4)) < [0.5, 0.4, 0.02, 0.3]).astype(np.uint8)
    targets = MultiHot(labels)
    names = [f"{i}.png" for i in range(len(labels))]
    parts = stratified(names, targets.strata(), (0.1, 0.2), seed=0)
    assert sorted(np.concatenate(parts).tolist()) == list(range(2000))
    for part, share in zip(parts, (0.7, 0.1, 0.2), strict=True):
        assert abs(targets.take(part).counts()[2] - share * targets.counts()[2]) <= 6
        assert len(part) == pytest.approx(share * 2000, rel=0.15)


def test_a_fingerprint_of_several_labels_is_that_of_their_rows():
    assert MultiHot(SEVERAL).fingerprint() == SEVERAL.tobytes()
    # a view that is not contiguous
    assert MultiHot(SEVERAL.T[::-1].T).fingerprint() == SEVERAL[:, ::-1].tobytes()
    assert MultiHot(SEVERAL[::-1]).fingerprint() != SEVERAL.tobytes()
