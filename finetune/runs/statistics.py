"""Curves over the confidence of predictions."""

import math

import numpy as np

# Shapes: N images, K classes, T thresholds.


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
