"""What counts of right answers say: intervals, a paired test, curves over confidence; NumPy alone."""

import math
from collections.abc import Sequence

import numpy as np

# Shapes: N pictures, T thresholds.

_Z = 1.959964  # of a 95 % interval


def wilson(num_right: float, num: float) -> tuple[float, float]:
    """Return the 95 % interval of a share; (0, 1) of nothing.

    Source: Wilson 1927, as in Agresti and Coull 1998 (The American Statistician 52), who advise it for any number.
    """
    if num == 0:
        return 0.0, 1.0
    share, z2 = num_right / num, _Z**2
    centre, scale = (share + z2 / (2 * num)) / (1 + z2 / num), 1 / (1 + z2 / num)
    half = _Z * scale * math.sqrt(share * (1 - share) / num + z2 / (4 * num**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def interval(num_right: float, num: int) -> str:
    """Return the `wilson` interval as text, `82.6–87.6 %`."""
    low, high = wilson(num_right, num)
    return f"{100 * low:.1f}–{100 * high:.1f} %"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def outcome(confusion: Sequence[Sequence[int]], split: str) -> str:
    """Return the accuracy on a split with its interval, in a line; rows of `confusion` are the true classes."""
    num = sum(map(sum, confusion))
    num_right = sum(row[i] for i, row in enumerate(confusion))
    return accuracy_line(num_right, num, split)


def accuracy_line(num_right: int, num: int, split: str) -> str:
    """Return an accuracy with its interval: `test accuracy 77.2 % (309 of 400; 95 % interval 72.9–81.1 %)`."""
    share = percent(num_right / max(1, num))
    counts = f"{num_right:,} of {num:,}"
    return f"{split} accuracy {share} ({counts}; 95 % interval {interval(num_right, num)})"


def mcnemar(only_a: int, only_b: int) -> float:
    """Return how likely two equally good classifiers differ at least so much on the same pictures (exact, two-sided).

    Args:
        only_a: Pictures that the first alone gets right.
        only_b: Those that the second alone does.

    Source: McNemar 1947; the exact form is a binomial test of the pictures on which they differ.
    """
    num, fewer = only_a + only_b, min(only_a, only_b)
    ways = tail = 1  # of none, and of as many or fewer
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
        lowest: The lowest confidence that is possible: 1 / K for K classes.
    """
    position = (confidence - lowest) / (1 - lowest)
    bins = np.clip((position * num_bins).astype(int), 0, num_bins - 1)
    found = [(confidence[bins == b], is_right[bins == b]) for b in range(num_bins)]
    return [(float(c.mean()), float(r.mean()), len(c)) for c, r in found if len(c)]


def num_reliability_bins(num: int) -> int:
    """Return how many bins of confidence to draw for `num` images: 3 up to 36 images, 10 from 400 on.

    With more bins for few images, each accuracy would be that of two or three images.
    """
    return min(10, max(3, round(math.sqrt(num) / 2)))


def unscaled(probabilities: np.ndarray, temperature: float) -> np.ndarray:
    """Return what probabilities (N, K) were before logits were divided by a temperature."""
    logits = temperature * np.log(np.maximum(probabilities, 1e-12))
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def precision_recall(
    score: np.ndarray, is_positive: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return thresholds, precision and recall, (T,) each, the highest first: said is what scores at least so much.

    Args:
        score: Probability of the positive class, (N,).
        is_positive: Whether the picture is of it, (N,) bool.
    """
    order = np.argsort(-score, kind="stable")
    score, hits = score[order], np.cumsum(is_positive[order])
    # of pictures with equal scores all are said, or none
    last = np.append(score[1:] != score[:-1], True)
    said = np.arange(1, len(score) + 1)
    return score[last], (hits / said)[last], (hits / max(1, int(is_positive.sum())))[last]


def coverage(confidence: np.ndarray, is_right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the share of pictures answered, most confident first, and the accuracy on them, (T,) each."""
    order = np.argsort(-confidence, kind="stable")
    confidence, hits = confidence[order], np.cumsum(is_right[order])
    last = np.append(confidence[1:] != confidence[:-1], True)
    answered = np.arange(1, len(confidence) + 1)
    return (answered / len(confidence))[last], (hits / answered)[last]
