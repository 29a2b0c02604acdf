"""Statistics of predictions: confidence intervals, a paired test, curves over confidence. Uses NumPy only."""

import math
from collections.abc import Sequence

import numpy as np

# Shapes: N images, K classes, T thresholds.

_Z = 1.959964  # standard errors on each side of a 95 % interval


def wilson(num_right: float, num: float) -> tuple[float, float]:
    """Return the 95 % interval of the share `num_right / num`; (0, 1) if `num` is 0.

    Source: Wilson 1927, as in Agresti and Coull 1998 (The American Statistician 52), who recommend it for any number.
    """
    if num == 0:
        return 0.0, 1.0
    share = num_right / num
    z2 = _Z**2
    centre = (share + z2 / (2 * num)) / (1 + z2 / num)
    scale = 1 / (1 + z2 / num)
    half = _Z * scale * math.sqrt(share * (1 - share) / num + z2 / (4 * num**2))
    # Rounding must not leave the share outside: at 0 and at 1 it is an end of the interval.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def interval(num_right: float, num: int) -> str:
    """Return the `wilson` interval as text, `82.6–87.6 %`."""
    low, high = wilson(num_right, num)
    return f"{100 * low:.1f}–{100 * high:.1f} %"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def num_right_of(confusion: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the number of images that are predicted correctly, and of all images.

    Args:
        confusion: The confusion matrix, (K, K). Rows are the true classes.
    """
    if any(count < 0 for row in confusion for count in row):
        raise ValueError("its confusion matrix has counts below 0")
    num_right = sum(row[i] for i, row in enumerate(confusion))
    return num_right, sum(map(sum, confusion))


def mcnemar(only_a: int, only_b: int) -> float:
    """Return the p-value of McNemar's exact, two-sided test.

    It is the probability that two equally good classifiers differ at least this much on the same images.

    Args:
        only_a: Number of images that only the first classifier predicts correctly.
        only_b: Number of images that only the second classifier predicts correctly.

    Source: McNemar 1947; the exact form is a binomial test of the images on which the classifiers differ.
    """
    num = only_a + only_b
    fewer = min(only_a, only_b)
    ways = tail = 1  # the binomial coefficient of num and k, and the sum of those up to k
    for k in range(fewer):
        ways = ways * (num - k) // (k + 1)
        tail += ways
    return min(1.0, 2 * tail / 2**num)


def reliability(
    confidence: np.ndarray, is_right: np.ndarray, num_bins: int = 10, lowest: float = 0.0
) -> list[tuple[float, float, int]]:
    """Return mean confidence, accuracy and number of images of each bin of confidence that is not empty.

    Args:
        confidence: Probability of the predicted class, (N,).
        is_right: Whether the prediction is correct, (N,) bool.
        num_bins: Equal parts of [lowest, 1].
        lowest: The lowest possible confidence: 1 / K for K classes.
    """
    position = (confidence - lowest) / (1 - lowest)
    bins = np.clip((position * num_bins).astype(int), 0, num_bins - 1)
    of_bins = [(confidence[bins == b], is_right[bins == b]) for b in range(num_bins)]
    return [(float(c.mean()), float(r.mean()), len(c)) for c, r in of_bins if len(c)]


def num_reliability_bins(num: int) -> int:
    """Return how many bins of confidence to draw for `num` images: 3 up to 36 images, 10 from 400 on.

    With more bins, a bin of a small test would have only two or three images.
    """
    return min(10, max(3, round(math.sqrt(num) / 2)))


def unscaled(probabilities: np.ndarray, temperature: float) -> np.ndarray:
    """Return probabilities (N, K) as they were before temperature scaling divided the logits by `temperature`."""
    logits = temperature * np.log(np.maximum(probabilities, 1e-12))
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def precision_recall(
    score: np.ndarray, is_positive: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return thresholds, precision and recall, (T,) each, from the highest threshold down.

    An image is predicted as positive if its score is at least the threshold.

    Args:
        score: Probability of the positive class, (N,).
        is_positive: Whether the image is of that class, (N,) bool.
    """
    order = np.argsort(-score, kind="stable")
    score = score[order]
    hits = np.cumsum(is_positive[order])
    # images with equal scores have the same prediction, so only the last of them counts
    last = np.append(score[1:] != score[:-1], True)
    num_predicted = np.arange(1, len(score) + 1)
    return score[last], (hits / num_predicted)[last], (hits / max(1, int(is_positive.sum())))[last]


def coverage(confidence: np.ndarray, is_right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return shares of the images, the most confident first, and the accuracy on each share, (T,) each."""
    order = np.argsort(-confidence, kind="stable")
    confidence = confidence[order]
    hits = np.cumsum(is_right[order])
    last = np.append(confidence[1:] != confidence[:-1], True)
    num_accepted = np.arange(1, len(confidence) + 1)
    return (num_accepted / len(confidence))[last], (hits / num_accepted)[last]
