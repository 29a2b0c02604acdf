"""The 95 % interval of a mean average precision, from a bootstrap over the test images."""

import numpy as np

from finetune.runs.best_epoch import num_trials_of_labels
from finetune.runs.statistics import wilson

_MAX_SAMPLES = 200
_MIN_SAMPLES = 30
_MAX_SCORES = 20_000_000  # of all samples together: about a second
_EDGE = 1e-3  # the corrected value stays this far from 0 and 1

# Shapes: N images, K labels.


def bootstrap_interval(value: float, labels: np.ndarray, scores: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of a mean average precision. It does not depend on chance: the seed is fixed.

    The average precision of few images is too high. Samples show by how much: their mean is above `value` by about as
    much as `value` is above that of infinitely many images. With the corrected value m and the variance v of the
    samples, the interval is Wilson's for a share m of n = m (1 - m) / v images, at most `num_trials_of_labels`.

    Args:
        value: The mean average precision.
        labels: Whether each image has each label, (N, K) bool.
        scores: Logits or probabilities, (N, K).
    """
    num_trials = num_trials_of_labels(labels.sum(axis=0))
    if num_trials == 0:
        return 0.0, 1.0
    rng = np.random.default_rng(0)
    num_images = len(labels)
    orders = np.argsort(-scores, axis=0, kind="stable")
    ordered = np.take_along_axis(labels, orders, 0)
    own = mean_precision(ordered, np.ones(ordered.shape))
    num_samples = min(_MAX_SAMPLES, max(_MIN_SAMPLES, _MAX_SCORES // labels.size))
    samples = [
        mean_precision(
            ordered,
            np.bincount(rng.integers(num_images, size=num_images), minlength=num_images)[orders],
        )
        for _ in range(num_samples)
    ]
    corrected = min(max(value - float(np.mean(samples)) + own, _EDGE), 1 - _EDGE)
    variance = float(np.var(samples))
    if variance > 0:
        num_trials = min(num_trials, corrected * (1 - corrected) / variance)
    low, high = wilson(corrected * num_trials, num_trials)
    return min(low, value), max(high, value)


def mean_precision(ordered: np.ndarray, weights: np.ndarray) -> float:
    """Return the mean average precision over the labels with images.

    Args:
        ordered: Whether each image has each label, (N, K); each label in the order of its scores, the highest first.
        weights: How often each of these images counts, (N, K).
    """
    hits = weights * ordered
    num_hits = hits.sum(axis=0)
    precision = hits.cumsum(axis=0) / np.maximum(weights.cumsum(axis=0), 1)
    of_labels = (precision * hits).sum(axis=0)[num_hits > 0] / num_hits[num_hits > 0]
    return float(of_labels.mean()) if len(of_labels) else 0.0
