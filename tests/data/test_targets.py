"""What images show, one class each."""

import numpy as np
import pytest

from finetune.data.targets import ClassIndex

LABELS = np.array([2, 0, 2, 2, -1], np.int64)


def test_counts_are_by_class_without_unknown_ones():
    targets = ClassIndex(LABELS, num_classes=4)
    assert targets.counts().tolist() == [1, 0, 3, 0] and len(targets) == 5
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
    # as records of earlier versions have it
    assert fingerprint == LABELS.tobytes()
    assert ClassIndex(LABELS[::-1].copy(), 4).fingerprint() != fingerprint


def test_a_stratum_is_a_class():
    assert ClassIndex(LABELS, 4).strata().tolist() == LABELS.tolist()
