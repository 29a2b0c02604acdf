"""Average precision: how well scores order the images with a label before those without it. Uses NumPy only."""

import math

import numpy as np

# Shapes: N images, K labels, S samples of the images.

_BLOCK = 2**22  # scores that are sorted at once: about 200 MB

Array = np.ndarray


def average_precision(scores: Array, labels: Array) -> Array:
    """Return the average precision of each label, (K,) float64; NaN if no image has it.

    It is that of scikit-learn's `average_precision_score`: images with equal scores are counted together.

    Args:
        scores: Logits or probabilities, (N, K).
        labels: Whether each image has each label, (N, K).
    """
    return sampled_average_precision(scores, labels, np.ones((1, len(labels)), np.int64))[0]


def sampled_average_precision(scores: Array, labels: Array, counts: Array) -> Array:
    """Return the average precision of each label in each sample, (S, K); NaN if no image of a sample has it.

    Args:
        scores: As in `average_precision`.
        labels: As in `average_precision`.
        counts: How often each image counts in each sample, (S, N).
    """
    width = max(1, _BLOCK // max(1, len(labels)))
    blocks = [slice(k, k + width) for k in range(0, labels.shape[1], width)]
    of_blocks = [_of_block(scores[:, block], labels[:, block], counts) for block in blocks]
    return np.concatenate(of_blocks, axis=1)


def _of_block(scores: Array, labels: Array, counts: Array) -> Array:
    order = np.argsort(-scores, axis=0, kind="stable")
    ordered = np.take_along_axis(scores, order, 0)
    is_positive = np.take_along_axis(labels, order, 0) > 0
    # for each image the place of the last one with the same score
    places = np.arange(len(scores))[:, None]
    is_last = np.append(ordered[1:] != ordered[:-1], np.ones_like(is_positive[:1]), axis=0)
    last = np.minimum.accumulate(np.where(is_last, places, len(scores))[::-1])[::-1]
    of_samples = []
    for of_images in counts:
        times = of_images[order]
        hits = times * is_positive
        precision = hits.cumsum(axis=0) / np.maximum(times.cumsum(axis=0), 1)
        num_hits = hits.sum(axis=0)
        total = (np.take_along_axis(precision, last, 0) * hits).sum(axis=0)
        of_samples.append(np.where(num_hits > 0, total / np.maximum(num_hits, 1), math.nan))
    return np.stack(of_samples)


def mean_average_precision(of_labels: Array) -> float:
    """Return the mean of average precisions (K,) over the labels that images have; NaN if they have none."""
    present = of_labels[~np.isnan(of_labels)]
    return float(present.mean()) if len(present) else math.nan
