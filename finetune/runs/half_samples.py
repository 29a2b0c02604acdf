"""The 95 % interval of a mean average precision, from random halves of the test images."""

import numpy as np

from finetune.runs.best_epoch import num_trials_of_labels
from finetune.runs.statistics import wilson

_MAX_SPLITS = 500  # into two halves
_MIN_SPLITS = 30
_MAX_SCORES = 50_000_000  # of all splits together: about a second
_NUM_AT_ONCE = 32  # splits
_MAX_WEIGHTS = 5_000_000  # of the images in these splits: memory
_EDGE = 1e-3  # the corrected value stays this far from 0 and 1

# Shapes: N images, K labels, S splits, R = 2 S halves, P images with a label.

Array = np.ndarray


def half_sample_interval(value: float, labels: Array, scores: Array) -> tuple[float, float]:
    """Return the 95 % interval of a mean average precision. It does not depend on chance: the seed is fixed.

    - Variance: the values of halves vary as much as those of other test sets of N images. Labels that occur together
      also do so in the halves, so their correlation is included.
    - Bias: the average precision of n images is too high, by an amount proportional to 1 / n. So the mean of the halves
      is above the value by about as much as the value is above that of infinitely many images.

    With the variance v and the corrected value m, the interval is Wilson's for a share m of n = m (1 - m) / v images.
    n is at most `num_trials_of_labels`, because halves with hardly any image of a label vary too little. The interval
    always contains the value.

    Args:
        value: The mean average precision.
        labels: Whether each image has each label, (N, K) bool.
        scores: Logits or probabilities, (N, K).

    Source: Efron 1982, "The jackknife, the bootstrap and other resampling plans", chapter 8, for half-sampling.
    """
    num_trials = num_trials_of_labels(labels.sum(axis=0))
    if num_trials == 0:
        return wilson(0, 0)
    num_splits = min(_MAX_SPLITS, max(_MIN_SPLITS, _MAX_SCORES // max(1, labels.size)))
    means = mean_precisions_of_halves(labels, scores, num_splits)
    bias = float(np.nanmean(means) - mean_precision(labels, scores))
    variance = float(np.nanvar(means))
    corrected = min(max(value - bias, _EDGE), 1 - _EDGE)
    if variance > 0:
        num_trials = min(num_trials, corrected * (1 - corrected) / variance)
    low, high = wilson(corrected * num_trials, num_trials)
    return min(low, value), max(high, value)


def mean_precisions_of_halves(labels: Array, scores: Array, num_splits: int) -> Array:
    """Return the mean average precision of both halves of random splits, (R,); NaN for one without labels.

    Labels without images in a half do not count in it.
    """
    rng = np.random.default_rng(0)
    orders = np.argsort(-scores, axis=0, kind="stable")
    num_at_once = min(_NUM_AT_ONCE, max(1, _MAX_WEIGHTS // max(1, len(labels))))
    parts = []
    for start in range(0, num_splits, num_at_once):
        weights = _halves(rng, len(labels), min(num_at_once, num_splits - start))
        parts.append(_mean_precisions(labels, orders, weights))
    return np.concatenate(parts)


def mean_precision(labels: Array, scores: Array) -> float:
    """Return the mean average precision of all images, over the labels with images."""
    orders = np.argsort(-scores, axis=0, kind="stable")
    return float(_mean_precisions(labels, orders, np.ones((len(labels), 1), np.float32))[0])


def _mean_precisions(labels: Array, orders: Array, weights: Array) -> Array:
    """Return the mean average precision of the images of each half, (R,); NaN for one without labels.

    Args:
        labels: (N, K) bool.
        orders: The images by the score of each label, the highest first, (N, K).
        weights: Whether each image is in each half, (N, R).
    """
    sums = np.zeros(weights.shape[1])
    counts = np.zeros(weights.shape[1])
    for k, order in enumerate(orders.T):
        precisions = _average_precisions(labels[order, k], weights[order])
        is_known = ~np.isnan(precisions)
        sums += np.where(is_known, precisions, 0.0)
        counts += is_known
    with np.errstate(invalid="ignore"):
        return sums / counts


def _average_precisions(is_positive: Array, weights: Array) -> Array:
    """Return the average precision of a label in each half, (R,); NaN if the half has no image with it.

    Args:
        is_positive: Whether each image has the label, (N,), the highest score first.
        weights: Whether each of these images is in each half, (N, R).
    """
    places = np.flatnonzero(is_positive)
    if len(places) == 0:
        return np.full(weights.shape[1], np.nan)
    hits = weights[places]
    starts = np.append(0, places[:-1] + 1)
    above = np.add.reduceat(weights[: places[-1] + 1], starts, axis=0).cumsum(axis=0)  # (P, R)
    precision = hits.cumsum(axis=0) / np.maximum(above, 1)
    with np.errstate(invalid="ignore"):
        return (precision * hits).sum(axis=0) / hits.sum(axis=0)


def _halves(rng: np.random.Generator, num_images: int, num_splits: int) -> Array:
    """Return whether each image is in each half, 0 or 1, (N, R) float32."""
    weights = np.zeros((2 * num_splits, num_images), np.float32)
    for first, second in weights.reshape(num_splits, 2, num_images):
        order = rng.permutation(num_images)
        first[order[: num_images // 2]] = 1
        second[order[num_images // 2 :]] = 1
    return np.ascontiguousarray(weights.T)
