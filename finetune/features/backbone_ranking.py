"""Rank networks by the held-out loss of a linear head on their frozen features.

The score of a network is the cross-validated log loss of a regularised logistic regression on its features, on the same
images for all networks.

Choosing the network by the data helps most for small data sets: arXiv:2410.08592.
"""

# Shapes: N images, D features, K classes.

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from finetune.features.logistic_regression import cross_validate

# Images: 8 per class on average, but within these limits. So many take a network of 50 million parameters half a minute
# on two cores.
_FEWEST_IMAGES = 512
_MOST_IMAGES = 4096
_IMAGES_OF_CLASS = 8
_FIRST_SHARE = 0.25  # of the time, for the images of the first network above the fewest
# Penalties of the head; the better one counts.
_STRENGTHS = (1e-3, 1e-4)
_SEEDS = (0, 1)  # of the folds: the mean of two cross-validations is more precise

# Computes the features of each image, (D,), one after another, by its index.
FeaturesOf = Callable[[NDArray[np.integer]], Iterable[NDArray[np.floating]]]


class Unusable(Exception):
    """A network cannot be ranked, for example because its weights cannot be downloaded. The message says why."""


class Standing(NamedTuple):
    """The scores of a network.

    Attributes:
        name: Name of the network.
        accuracy: Accuracy of the held-out predictions.
        loss: Mean log loss of the held-out predictions, by which networks are ranked.
        num_images: Number of images.
        seconds: Time, including a download.
    """

    name: str
    accuracy: float
    loss: float
    num_images: int
    seconds: float


@dataclass
class Ranking:
    """The result of ranking networks.

    Attributes:
        standings: Scores, best network first; empty if no network could be used.
        unusable: Reason for each network that could not be used.
        untried: Networks that were not tried for lack of time.
    """

    standings: list[Standing] = field(default_factory=list)
    unusable: dict[str, str] = field(default_factory=dict)
    untried: list[str] = field(default_factory=list)


def rank(
    networks: Mapping[str, Callable[[], FeaturesOf]],
    labels: NDArray[np.integer],
    num_classes: int,
    seconds: float,
    seed: int = 0,
    groups: NDArray[np.integer] | None = None,
) -> Ranking:
    """Rank networks on the same images, until the time is over.

    If the first network is slow, there are fewer images, so that others are tried too.

    Args:
        networks: Functions that load each network, or raise `Unusable`.
        labels: Class index of each image, (N,).
        num_classes: K.
        seconds: Time budget. The first usable network is always tried, on at least 512 images.
        seed: Seed of the choice of images.
        groups: Group of each image, (N,), in any numbers; None if each image is a group of its own.
    """
    num = max(_FEWEST_IMAGES, min(_MOST_IMAGES, _IMAGES_OF_CLASS * num_classes))
    chosen = stratified_order(labels, seed)[:num]
    ranking = Ranking()
    deadline = time.monotonic() + seconds
    for name, load in networks.items():
        began = time.monotonic()
        is_first = not ranking.standings
        if began > deadline and not is_first:
            ranking.untried.append(name)
            continue
        try:
            features_of = load()
        except Unusable as error:
            ranking.unusable[name] = str(error)
            continue
        if is_first:
            until = time.monotonic() + _FIRST_SHARE * seconds
            features = np.stack([*_computed(features_of(chosen), until, _FEWEST_IMAGES)])
            chosen = chosen[: len(features)]
        else:
            features = np.stack([*_computed(features_of(chosen), deadline)])
        if len(features) < len(chosen):
            ranking.untried.append(name)
            continue
        if not np.isfinite(features).all():
            ranking.unusable[name] = "its features are not finite"
            continue
        of_images = None if groups is None else groups[chosen]
        loss, accuracy, _ = cross_validated_scores(features, labels[chosen], num_classes, of_images)
        duration = time.monotonic() - began
        ranking.standings.append(Standing(name, accuracy, loss, len(chosen), duration))
    ranking.standings.sort(key=lambda standing: standing.loss)
    return ranking


def _computed(
    rows: Iterable[NDArray[np.floating]], until: float, fewest: int = 1
) -> Iterator[NDArray[np.floating]]:
    """Yield the features of images until a time is over, but of the fewest images in any case."""
    for num, row in enumerate(rows, 1):
        yield row
        if num >= fewest and time.monotonic() > until:
            return


def stratified_order(labels: NDArray[np.integer], seed: int) -> NDArray[np.int64]:
    """Return an order of the images, (N,), such that every prefix has about the class frequencies of the data set."""
    rng = np.random.default_rng(seed)
    places = np.empty(len(labels))
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        places[rows] = (np.arange(len(rows)) + rng.random()) / len(rows)
    return np.argsort(places, kind="stable")


def cross_validated_scores(
    features: NDArray[np.floating],
    labels: NDArray[np.integer],
    num_classes: int,
    groups: NDArray[np.integer] | None = None,
) -> tuple[float, float, float]:
    """Return the cross-validated log loss and accuracy of a head at the best strength, and this strength.

    Without images to hold out they are those of chance.

    Args:
        features: (N, D).
        labels: (N,).
        num_classes: K.
        groups: Group of each image, (N,), which no fold divides; None if each image is a group of its own.
    """
    tables = [
        cross_validate(features, labels, num_classes, _STRENGTHS, groups, seed=seed).table
        for seed in _SEEDS
    ]
    if not all(tables):
        return math.log(num_classes), 1 / num_classes, _STRENGTHS[0]
    means = np.mean(tables, axis=0).tolist()
    return min((loss, accuracy, strength) for strength, loss, accuracy in means)
