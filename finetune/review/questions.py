"""Which images without labels to ask about next, and what the answers teach.

The most useful images are typical ones at first, then those about which a head of the answers is least sure. How many
labels this saves: docs/decisions.md. In each batch one image is random: it follows an order that is fixed before the
first answer. The images at the beginning of that order, up to the first open one, are nearly a random sample of those
with features, whether they were asked about as random or as useful. From them the accuracy is estimated. Skipped and
excluded ones have no label to compare with: they are left out, and the page says how many.
"""

# Shapes: M images, D features, R of their principal coordinates, K classes.

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from finetune.features.label_errors import STRENGTH
from finetune.features.logistic_regression import fit_probe

BATCH = 5  # questions after which the head is solved again
TYPICAL_PER_CLASS = 2  # questions about typical images, before there are enough answers for a head
_MOST_TYPICAL = 100  # of many classes, in a second
_MOST_COMPARED = 2000  # images of which the typical ones are chosen


def random_order(num: int) -> NDArray[np.int64]:
    """Return a random order of images, (N,), which is always the same."""
    return np.random.default_rng(0).permutation(num)


def learn(
    coordinates: NDArray[np.float64], labels: NDArray[np.integer], num_classes: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Fit a head on the answered images, of at least two classes.

    Args:
        coordinates: Features of all images, (M, R).
        labels: The class of each image; -1 if it has no answer, (M,).
        num_classes: K.

    Returns:
        The probability of each class, (M, K), and whether a head that was fitted without the image predicts its answer,
        (M,): 0 or 1, or NaN if it has no answer or no image can be held out.
    """
    rows = np.flatnonzero(labels >= 0)
    probe = fit_probe(coordinates[rows], labels[rows], num_classes, [STRENGTH])
    is_right = np.full(len(labels), np.nan)
    if probe.validation.table:
        is_right[rows] = probe.validation.out_of_fold.argmax(axis=1) == labels[rows]
    return softmax(coordinates @ probe.weight.T + probe.bias, axis=1), is_right


def typical_images(features: NDArray[np.float32], num: int) -> NDArray[np.int64]:
    """Return images that represent the others, at most `num`, the most typical first.

    Each one adds most to the sum over images of the similarity to the nearest of them (facility location).

    Args:
        features: With a mean of 0 and a norm of 1, (M, D).
        num: Number of images.
    """
    sample = random_order(len(features))[:_MOST_COMPARED]
    similarity = features[sample] @ features[sample].T
    covered = np.zeros(len(sample), np.float32)
    chosen: list[int] = []
    while len(chosen) < min(num, len(sample), _MOST_TYPICAL):
        gains = np.maximum(similarity, covered).sum(axis=1)
        gains[chosen] = -np.inf
        chosen.append(int(gains.argmax()))
        covered = np.maximum(covered, similarity[chosen[-1]])
    return sample[chosen]


def most_useful(
    typical: NDArray[np.int64], probabilities: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return all images, the most useful first: typical ones, then those about which a head is least sure.

    Args:
        typical: Typical images.
        probabilities: (M, K). The head is least sure if the two largest ones are nearly equal.
    """
    largest = np.sort(probabilities, axis=1)
    margins = largest[:, -1] - largest[:, -2]
    return np.concatenate([typical, np.argsort(margins, kind="stable")])


def estimate(is_right: NDArray[np.float64], is_open: NDArray[np.bool_]) -> tuple[int, int, int]:
    """Return how many images of the random sample are predicted right, how many have an answer, and its size.

    Args:
        is_right: As `learn` returns it, in the random order, (M,).
        is_open: Which images have not been asked about, in the same order, (M,).
    """
    size = int(is_open.argmax()) if is_open.any() else len(is_open)
    sample = is_right[:size]
    answered = sample[~np.isnan(sample)]
    return int(answered.sum()), len(answered), size
