"""The interval of a mean average precision, compared with the true value of simulated test sets."""

import numpy as np
import pytest
from drawn_scores import draw, mean_precision
from promise import control, promise
from sklearn.metrics import average_precision_score

from finetune.runs import bootstrap
from finetune.runs.best_epoch import num_trials_of_labels
from finetune.runs.bootstrap import bootstrap_interval
from finetune.runs.statistics import wilson


def value_of(labels: np.ndarray, scores: np.ndarray) -> float:
    ordered = np.take_along_axis(labels, np.argsort(-scores, axis=0), 0)
    return bootstrap.mean_precision(ordered, np.ones(labels.shape))


def test_the_value_of_a_sample_is_that_of_scikit_learn():
    rng = np.random.default_rng(1)
    labels, scores = draw(rng, 141, np.array([0.1, 0.3, 0.5]))
    orders = np.argsort(-scores, axis=0)
    ordered = np.take_along_axis(labels, orders, 0)
    chosen = rng.integers(141, size=141)
    weights = np.bincount(chosen, minlength=141)
    expected = average_precision_score(labels[chosen], scores[chosen])
    assert bootstrap.mean_precision(ordered, weights[orders]) == pytest.approx(expected)
    # a label without images does not count
    ordered[:, 0] = False
    assert bootstrap.mean_precision(ordered, weights[orders]) == pytest.approx(
        average_precision_score(labels[chosen][:, 1:], scores[chosen][:, 1:])
    )


@promise("interval")
@control("interval")
@pytest.mark.parametrize(
    ("num", "share", "shared"),
    [(20, 0.1, 0.0), (200, 0.2, 0.9), (100, 0.3, 0.0)],
    ids=["two images of each label", "labels that occur together", "independent labels"],
)
def test_the_interval_covers_the_true_value(monkeypatch, num, share, shared):
    monkeypatch.setattr(bootstrap, "_MAX_SAMPLES", 100)
    rng = np.random.default_rng(0)
    shares = np.full(10, share)
    truth = np.mean([mean_precision(*draw(rng, 20_000, shares, shared)) for _ in range(2)])
    hits = 0
    approximate_hits = 0
    for _ in range(100):
        labels, scores = draw(rng, num, shares, shared)
        value = value_of(labels, scores)
        low, high = bootstrap_interval(value, labels, scores)
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
    value = value_of(labels, scores)
    assert bootstrap_interval(value, labels, scores) == bootstrap_interval(
        value, labels, 3 * scores - 1
    )
    perfect = np.where(labels, 1.0, 0.0) + 1e-3 * scores
    num_trials = num_trials_of_labels(labels.sum(axis=0))
    low, high = bootstrap_interval(1.0, labels, perfect)
    assert (low, high) == pytest.approx(wilson(num_trials, num_trials), abs=2e-3)
    assert bootstrap_interval(0.0, labels & False, scores) == (0.0, 1.0)
