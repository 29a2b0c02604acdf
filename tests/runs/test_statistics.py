"""Intervals, tests and curves, compared with SciPy, scikit-learn and counting by hand."""

import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn.metrics import precision_recall_curve

from finetune.runs import statistics
from finetune.runs.statistics import (
    accuracy_line,
    coverage,
    interval,
    mcnemar,
    num_reliability_bins,
    num_right_of,
    percent,
    reliability,
    unscaled,
    wilson,
)


@pytest.mark.parametrize(
    ("num_right", "num"), [(0, 1), (1, 1), (0, 30), (17, 20), (682, 800), (9_999, 10_000)]
)
def test_intervals_are_scipys(num_right, num):
    expected = binomtest(num_right, num).proportion_ci(method="wilson")
    assert wilson(num_right, num) == pytest.approx((expected.low, expected.high), abs=1e-6)
    # Not the textbook's normal one, which is a point at 0 and at 1.
    assert np.subtract(*wilson(num_right, num)[::-1]) > 1e-4


@pytest.mark.parametrize("num", range(1, 1000))
def test_no_share_is_outside_of_its_interval(num):
    for num_right in (0, num):
        low, high = wilson(num_right, num)
        assert 0 <= low <= num_right / num <= high <= 1


def test_of_nothing_all_is_possible():
    assert wilson(0, 0) == (0, 1)


@pytest.mark.parametrize(
    ("a", "b"), [(0, 0), (1, 0), (0, 5), (3, 3), (40, 21), (700, 610), (10_000, 10_500)]
)
def test_the_paired_test_is_binomial(a, b):
    expected = binomtest(a, a + b).pvalue if a + b else 1.0
    assert mcnemar(a, b) == mcnemar(b, a) == pytest.approx(expected, rel=1e-9)


def test_bins_of_confidence():
    confidence = np.array([0.55, 0.5, 0.95, 1.0, 0.91])
    right = np.array([True, False, True, True, False])
    assert reliability(confidence, right) == [
        (pytest.approx(0.525), pytest.approx(0.5), 2),
        (pytest.approx(2.86 / 3), pytest.approx(2 / 3), 3),
    ]


def test_precision_and_recall_are_scikit_trains():
    rng = np.random.default_rng(0)
    score = np.round(rng.random(200), 2)  # many are equal
    positive = rng.random(200) < score
    thresholds, precision, recall = statistics.precision_recall(score, positive)
    expected = precision_recall_curve(positive, score)
    np.testing.assert_allclose(precision, expected[0][:-1][::-1])
    np.testing.assert_allclose(recall, expected[1][:-1][::-1])
    np.testing.assert_allclose(thresholds, expected[2][::-1])


def test_the_most_confident_are_answered_first():
    share, accuracy = coverage(np.array([0.6, 0.9, 0.8, 0.8]), np.array([False, True, False, True]))
    np.testing.assert_allclose(share, [0.25, 0.75, 1])  # those of 0.8 together
    np.testing.assert_allclose(accuracy, [1, 2 / 3, 0.5])


def test_words_for_shares():
    assert percent(0.8524) == "85.2 %" and interval(0, 0) == "0.0–100.0 %"
    reported = accuracy_line(*num_right_of([[1_000, 20], [11, 300]]), "test")
    assert reported == "test accuracy 97.7 % (1,300 of 1,331; 95 % interval 96.7–98.4 %)"
    assert accuracy_line(*num_right_of([[0, 0], [0, 0]]), "val").startswith(
        "val accuracy 0.0 % (0 of 0; "
    )


def test_before_a_temperature():
    logits = np.random.default_rng(0).normal(0, 3, (20, 4))
    softmax = [np.exp(z) / np.exp(z).sum(axis=1, keepdims=True) for z in (logits, logits / 1.7)]
    np.testing.assert_allclose(unscaled(softmax[1], 1.7), softmax[0], rtol=1e-9)
    assert np.isfinite(unscaled(np.eye(3), 0.2)).all()


def test_few_images_have_few_bins_of_confidence():
    assert [num_reliability_bins(num) for num in (1, 23, 100, 400, 100_000)] == [3, 3, 5, 10, 10]
    confidence = np.array([0.5, 0.74, 0.76, 1.0])
    right = np.array([True, False, True, True])
    halves = reliability(confidence, right, num_bins=2, lowest=0.5)
    assert [num for *_, num in halves] == [2, 2]
    assert [num for *_, num in reliability(confidence, right, num_bins=2)] == [4]  # control
