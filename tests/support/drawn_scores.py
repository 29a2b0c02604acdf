"""Labels and logits of images from a known distribution, to compare intervals with the true value."""

from statistics import NormalDist

import numpy as np

SHARES = np.array([0.1, 0.2, 0.35, 0.5])  # of the images that have each label
SEPARATION = 1.5  # standard deviations between the logits of both kinds


def draw(
    rng: np.random.Generator, num: int, shares: np.ndarray = SHARES, shared: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return labels and logits; `shared` is the correlation of the normal variables behind the labels of an image."""
    own = rng.normal(size=(num, len(shares)))
    common = rng.normal(size=(num, 1))
    limits = [NormalDist().inv_cdf(share) for share in shares.tolist()]
    labels = np.sqrt(shared) * common + np.sqrt(1 - shared) * own < limits
    return labels, rng.normal(size=labels.shape) + SEPARATION * labels


def mean_precision(labels: np.ndarray, logits: np.ndarray) -> float:
    ordered = np.take_along_axis(labels, np.argsort(-logits, axis=0), 0)
    precision = ordered.cumsum(axis=0) / np.arange(1, len(labels) + 1)[:, None]
    return float(((precision * ordered).sum(axis=0) / ordered.sum(axis=0)).mean())
