"""Rank networks by the held-out loss of a linear head on their frozen features, with successive halving.

All networks are tried on few images, the better half on twice as many, until one is left. The score of a network is the
cross-validated log loss of a regularised logistic regression on its features.

Source: Jamieson and Talwalkar, Non-stochastic Best Arm Identification (arXiv:1502.07943). Choosing the network by the
data helps most for small data sets: arXiv:2410.08592.
"""

# Shapes: N images, D features, K classes.

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax

from finetune.features.logistic_regression import first_of_groups, fit_head

MOST_IMAGES = 1024  # images of the last round
# images of the first round, if there are that many: 8 per class on average, but within these limits
FEWEST_IMAGES = 256
_FEWEST_OF_CLASS = 8
_MOST_OF_FIRST_ROUND = 4096
_NUM_FOLDS = 5
_FEW_IMAGES = 512  # up to this number cross-validation is repeated with other folds
# penalties of the head; the better one counts (docs/networks.md, "Let the data choose")
_STRENGTHS = (1e-3, 1e-4)
_MIN_GROWTH = 1.25  # smallest ratio of the images of a further round to those of the last one

# Maps indices of images and a deadline (of `time.monotonic`, None for no deadline) to features (N, D).
FeaturesOf = Callable[[NDArray[np.integer], float | None], NDArray[np.floating]]


class OutOfTime(Exception):
    """The features were not finished in time."""


class Unusable(Exception):
    """A network cannot be ranked, for example because its weights cannot be downloaded. The message says why."""


@dataclass(frozen=True)
class Standing:
    """The scores of a network in the last round that it finished.

    Attributes:
        name: Name of the network.
        accuracy: Accuracy of the held-out predictions.
        loss: Mean log loss of the held-out predictions, by which networks are ranked.
        num_images: Number of images of that round.
        seconds: Time of all rounds, including downloads.
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
        is_cut: Whether a round was skipped, made smaller or aborted for lack of time.
        num_images: Number of available images.
    """

    standings: list[Standing] = field(default_factory=list)
    unusable: dict[str, str] = field(default_factory=dict)
    untried: list[str] = field(default_factory=list)
    is_cut: bool = False
    num_images: int = 0


def rank(
    networks: Mapping[str, Callable[[], FeaturesOf]],
    labels: NDArray[np.integer],
    num_classes: int,
    seconds: float,
    seed: int = 0,
    groups: NDArray[np.integer] | None = None,
) -> Ranking:
    """Rank networks by successive halving.

    Args:
        networks: Functions that load each network, or raise `Unusable`. A network stays loaded until it is eliminated.
        labels: Class index of each image, (N,).
        num_classes: K.
        seconds: Time budget. The first usable network is always tried on the images of the first round.
        seed: Seed of the order of the images.
        groups: Group of each image, (N,), in any numbers; None if each image is a group of its own.
    """
    groups = np.arange(len(labels)) if groups is None else groups
    order = stratified_order(labels, seed)[: max(MOST_IMAGES, _fewest_images(num_classes))]
    candidates = [_RankedNetwork(name, load) for name, load in networks.items()]
    images = _Images(labels, groups, num_classes)
    halving = _SuccessiveHalving(candidates, order, images, time.monotonic() + seconds)
    num = first_round(len(order), num_classes, len(networks))
    try:
        halving.run_round(num)
        while len(halving.remaining) > 1 and num < len(order):
            wanted = min(2 * num, len(order))
            following = halving.affordable(num, wanted)
            if following < wanted:
                halving.ranking.is_cut = True
            if following < min(_MIN_GROWTH * num, len(order)):
                break
            num = following
            halving.run_round(num)
    except OutOfTime:
        halving.ranking.is_cut = True
    halving.ranking.standings = halving.standings()
    return halving.ranking


def first_round(num_images: int, num_classes: int, num_networks: int) -> int:
    """Return the number of images of the first round, such that the last round has all images."""
    num_rounds = max(1, math.ceil(math.log2(max(2, num_networks))))
    return min(num_images, max(_fewest_images(num_classes), num_images // 2 ** (num_rounds - 1)))


def _fewest_images(num_classes: int) -> int:
    return min(_MOST_OF_FIRST_ROUND, max(FEWEST_IMAGES, _FEWEST_OF_CLASS * num_classes))


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

    For few images cross-validation is repeated with other folds, which makes the scores more precise.

    Args:
        features: (N, D).
        labels: (N,).
        num_classes: K.
        groups: Group of each image, (N,), which no fold divides; None if each image is a group of its own.
    """
    x = _reduce_dimensions(features)
    groups = np.arange(len(labels)) if groups is None else groups
    deals = [_folds(labels, groups, seed) for seed in range(2 if len(labels) <= _FEW_IMAGES else 1)]
    scores = []
    for strength in _STRENGTHS:
        repeats = [_cross_validate(x, labels, num_classes, strength, folds) for folds in deals]
        loss, accuracy = np.mean(repeats, axis=0).tolist()
        scores.append((loss, accuracy, strength))
    return min(scores)


def _folds(
    labels: NDArray[np.integer], groups: NDArray[np.integer], seed: int
) -> NDArray[np.int64]:
    """Return the fold of each image, (N,). The groups of each class are assigned at random and evenly."""
    rng = np.random.default_rng(seed)
    first, group_of = first_of_groups(groups)
    folds = np.empty(len(first), np.int64)
    for label in np.unique(labels[first]):
        rows = rng.permutation(np.flatnonzero(labels[first] == label))
        folds[rows] = (label + np.arange(len(rows))) % _NUM_FOLDS
    return folds[group_of]


def _cross_validate(
    x: NDArray[np.float64],
    labels: NDArray[np.integer],
    num_classes: int,
    strength: float,
    folds: NDArray[np.int64],
) -> tuple[float, float]:
    losses = np.empty(len(labels))
    hits = np.empty(len(labels), bool)
    for fold in np.unique(folds):
        held = folds == fold
        fitted = held if held.all() else ~held  # a single group is both fitted and held out
        weight, bias = fit_head(x[fitted], labels[fitted], num_classes, strength)
        log_probabilities = log_softmax(x[held] @ weight.T + bias, axis=1)
        losses[held] = -log_probabilities[np.arange(len(log_probabilities)), labels[held]]
        hits[held] = log_probabilities.argmax(axis=1) == labels[held]
    return float(losses.mean()), float(hits.mean())


class _Images(NamedTuple):
    """The images of the data set, by which networks are ranked.

    Attributes:
        labels: Class index of each image, (N,).
        groups: Group of each image, (N,).
        num_classes: K.
    """

    labels: NDArray[np.integer]
    groups: NDArray[np.integer]
    num_classes: int


class _RankedNetwork:
    """A network with its features and its standing so far."""

    def __init__(self, name: str, load: Callable[[], FeaturesOf]) -> None:
        self.name = name
        self.load = load
        self.features_of: FeaturesOf | None = None
        self.parts: list[NDArray[np.floating]] = []  # features of the images of all rounds so far
        self.standing: Standing | None = None

    def loss(self) -> float:
        assert self.standing is not None
        return self.standing.loss

    def update_standing(
        self,
        chosen: NDArray[np.integer],
        images: _Images,
        deadline: float | None,
    ) -> None:
        """Compute the standing on some images. Only the features of new images are computed.

        Args:
            chosen: Indices of the images, which begin with those of the earlier rounds.
            images: All images of the data set.
            deadline: Time of `time.monotonic` at which to stop; None for no deadline.

        Raises:
            Unusable: The network cannot be loaded, or its features are not finite.
            OutOfTime: The deadline has passed.
        """
        began = time.monotonic()
        if self.features_of is None:
            self.features_of = self.load()
        num_known = sum(map(len, self.parts))
        part = self.features_of(chosen[num_known:], deadline)
        if not np.isfinite(part).all():
            raise Unusable("its features are not finite")
        self.parts.append(part)
        loss, accuracy, _ = cross_validated_scores(
            np.concatenate(self.parts),
            images.labels[chosen],
            images.num_classes,
            images.groups[chosen],
        )
        before = self.standing.seconds if self.standing else 0.0
        self.standing = Standing(
            self.name, accuracy, loss, len(chosen), before + time.monotonic() - began
        )


class _SuccessiveHalving:
    """Compares networks on the same images, round by round, and eliminates the worse half after each.

    Attributes:
        remaining: Networks that are not eliminated; after a round the best is first.
        ranking: The result so far, without standings.
    """

    def __init__(
        self,
        candidates: list[_RankedNetwork],
        order: NDArray[np.integer],
        images: _Images,
        deadline: float,
    ) -> None:
        self.remaining = candidates
        self.ranking = Ranking(num_images=len(order))
        self._order = order
        self._images = images
        self._deadline = deadline
        self._eliminated: list[_RankedNetwork] = []

    def run_round(self, num: int) -> None:
        """Try the remaining networks on the first `num` images, and eliminate the worse half.

        Raises:
            OutOfTime: The round was not finished. Its standings are discarded, except in the first round, in which the
                other networks count as untried.
        """
        before = [network.standing for network in self.remaining]
        try:
            for network in self.remaining:
                self._try(network, num)
        except OutOfTime:
            if any(before):
                for network, standing in zip(self.remaining, before, strict=True):
                    network.standing = standing
            else:
                self.ranking.untried = [
                    network.name
                    for network in self.remaining
                    if network.standing is None and network.name not in self.ranking.unusable
                ]
            self._sort()
            raise
        self._sort()
        half = math.ceil(len(self.remaining) / 2)
        for network in self.remaining[half:]:
            network.features_of = None  # frees the network's memory
        self._eliminated = self.remaining[half:] + self._eliminated
        self.remaining = self.remaining[:half]

    def _try(self, network: _RankedNetwork, num: int) -> None:
        """Try one network. The first usable network has no deadline."""
        has_any = any(other.standing is not None for other in self.remaining)
        if has_any and time.monotonic() > self._deadline:
            raise OutOfTime
        deadline = self._deadline if has_any else None
        try:
            chosen = self._order[:num]
            network.update_standing(chosen, self._images, deadline)
        except Unusable as error:
            self.ranking.unusable[network.name] = str(error)
            network.standing = None

    def _sort(self) -> None:
        """Sort the remaining networks by loss, and remove those without a standing."""
        usable = [network for network in self.remaining if network.standing is not None]
        self.remaining = sorted(usable, key=_RankedNetwork.loss)

    def affordable(self, num: int, wanted: int) -> int:
        """Return the number of images of the next round: `wanted`, or fewer if the time does not suffice.

        Args:
            num: Number of images of the last round.
            wanted: Number of images that the next round should have.
        """
        rate = sum(
            standing.seconds / standing.num_images
            for standing in _finished_standings(self.remaining)
        )
        seconds = max(0.0, self._deadline - time.monotonic())
        return num + int(min(wanted - num, seconds / max(rate, 1e-9)))

    def standings(self) -> list[Standing]:
        """Return the standings of all networks, the best first."""
        return _finished_standings(self.remaining + self._eliminated)


def _finished_standings(networks: Sequence[_RankedNetwork]) -> list[Standing]:
    return [network.standing for network in networks if network.standing is not None]


def _reduce_dimensions(features: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return centred features in the subspace that the images span. A regularised head predicts the same, but faster.

    It uses torch, because waiting threads of NumPy take CPU time.
    """
    x = torch.from_numpy(np.asarray(features, np.float64))
    x = x - x.mean(dim=0)
    if len(x) >= x.shape[1]:
        return x.numpy()
    values, vectors = torch.linalg.eigh(x @ x.T)
    kept = values > 1e-12 * values[-1].clamp(min=1e-300)
    return (vectors[:, kept] * values[kept].sqrt()).numpy()
