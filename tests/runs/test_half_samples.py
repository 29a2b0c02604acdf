"""The interval of a mean average precision, compared with the true value of simulated test sets."""

import numpy as np
import pytest
from drawn_scores import draw, mean_precision
from sklearn.metrics import average_precision_score

from finetune.runs import half_samples
from finetune.runs.best_epoch import num_trials_of_labels
from finetune.runs.half_samples import half_sample_interval, mean_precisions_of_halves
from finetune.runs.statistics import wilson


def test_the_value_of_each_half_is_that_of_scikit_learn():
    labels, scores = draw(np.random.default_rng(1), 41, np.array([0.1, 0.3, 0.5]))
    found = mean_precisions_of_halves(labels, scores, 40)
    weights = half_samples._halves(np.random.default_rng(0), 41, 32)
    assert (
        weights.sum(axis=0).tolist() == [20, 21] * 32
    )  # and every image is in one half of each split
    assert (weights[:, ::2] + weights[:, 1::2] == 1).all()
    for value, own in zip(found, weights.T == 1, strict=False):
        present = labels[own].any(axis=0)
        y = labels[own][:, present]
        assert value == pytest.approx(average_precision_score(y, scores[own][:, present]))
    assert len(found) == 80 and np.ptp(found) > 0.1
    # a label without images does not count, and without any label there is no value
    labels[:, 0] = False
    assert np.array_equal(
        mean_precisions_of_halves(labels, scores, 5),
        mean_precisions_of_halves(labels[:, 1:], scores[:, 1:], 5),
    )
    assert np.isnan(mean_precisions_of_halves(labels & False, scores, 1)).all()


@pytest.mark.parametrize(
    ("num", "share", "shared"),
    [(20, 0.1, 0.0), (200, 0.2, 0.9), (100, 0.3, 0.0)],
    ids=["two images of each label", "labels that occur together", "independent labels"],
)
def test_the_interval_covers_the_true_value(monkeypatch, num, share, shared):
    monkeypatch.setattr(half_samples, "_MAX_SPLITS", 100)
    rng = np.random.default_rng(0)
    shares = np.full(10, share)
    truth = np.mean([mean_precision(*draw(rng, 20_000, shares, shared)) for _ in range(2)])
    hits = 0
    approximate_hits = 0
    for _ in range(100):
        labels, scores = draw(rng, num, shares, shared)
        value = half_samples.mean_precision(labels, scores)
        low, high = half_sample_interval(value, labels, scores)
        assert low <= value <= high
        hits += low <= truth <= high
        num_trials = num_trials_of_labels(labels.sum(axis=0))
        low, high = wilson(value * num_trials, num_trials)
        approximate_hits += low <= truth <= high
    # docs/labels.md states at least 91 of 100; two standard errors are 6
    assert hits >= 86
    # the control: the approximation, where its assumptions do not hold
    assert (approximate_hits < 86) == (num != 100)


def test_it_depends_on_the_images_alone_and_has_a_width_if_all_are_right():
    labels, scores = draw(np.random.default_rng(2), 60)
    value = half_samples.mean_precision(labels, scores)
    assert half_sample_interval(value, labels, scores) == half_sample_interval(
        value, labels, 3 * scores - 1
    )
    perfect = np.where(labels, 1.0, 0.0) + 1e-3 * scores
    num_trials = num_trials_of_labels(labels.sum(axis=0))
    low, high = half_sample_interval(1.0, labels, perfect)
    assert (low, high) == pytest.approx(wilson(num_trials, num_trials), abs=2e-3)
    assert half_sample_interval(0.0, labels & False, scores) == (0.0, 1.0)
