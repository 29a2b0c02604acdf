"""Rank networks by how well a linear head on their frozen features predicts held-out images: successive halving.

All networks are tried on few images, the better half on twice as many, until one is left. A network's score is the
cross-validated log loss of a regularised logistic regression on its features. Source: Jamieson and Talwalkar,
Non-stochastic Best Arm Identification (arXiv:1502.07943); that choosing the network by the data pays most for small
data sets: arXiv:2410.08592.
"""

# Shapes: N images, D features, K classes.

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax

from finetune.features.logistic_regression import fit_head

MOST_IMAGES = 1024  # of which the last two networks are compared
FEWEST_IMAGES = 256  # of the first round, if there are as many
_FEWEST_OF_CLASS = 8  # images per class in the first round, on average,
_MOST_OF_FIRST_ROUND = 4096  # unless the first round would then have more images than this
_NUM_FOLDS = 5
_FEW_IMAGES = 512  # up to which the folds are dealt twice
# of the head; the better one counts (docs/networks.md, "Let the data choose")
_STRENGTHS = (1e-3, 1e-4)
_WORTH_IT = 1.25  # how many times as many images a further round must have

# Given indices of images and the time of `time.monotonic` at which to stop, None for never, returns features (N, D).
FeaturesOf = Callable[[NDArray[np.integer], float | None], NDArray[np.floating]]


class OutOfTime(Exception):
    """The features were not finished in time."""


class Unusable(Exception):
    """A network cannot be ranked, such as one whose weights cannot be downloaded; the message says why."""


@dataclass(frozen=True)
class Standing:
    """How a network did in the last round that it finished.

    Attributes:
        name: The network.
        accuracy: Share of the images whose held-out prediction is right.
        loss: Mean log loss of the held-out predictions, by which networks are ranked.
        num_images: Images of that round.
        seconds: In all rounds, downloads included.
    """

    name: str
    accuracy: float
    loss: float
    num_images: int
    seconds: float


@dataclass
class Ranking:
    """The result.

    Attributes:
        standings: The best network first; none if no network could be used.
        unusable: Networks that could not be used, and why.
        untried: Networks that there was no time for.
        is_cut: Whether a round was skipped, made smaller or given up for lack of time.
        num_images: How many images there were to use.
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
) -> Ranking:
    """Rank networks by successive halving.

    Args:
        networks: Loads each network when its turn comes; it is kept until it is eliminated. Raises `Unusable`.
        labels: Class index of each image, (N,).
        num_classes: K.
        seconds: Time budget. The first network that can be used is always tried on the images of the first round.
        seed: Seed of the order in which images are taken, and of the folds.
    """
    order = stratified_order(labels, seed)[: max(MOST_IMAGES, _fewest_images(num_classes))]
    contenders = [_Contender(name, load) for name, load in networks.items()]
    race = _Race(contenders, order, labels, num_classes, time.monotonic() + seconds)
    num = first_round(len(order), num_classes, len(networks))
    try:
        race.play(num)
        while len(race.contenders) > 1 and num < len(order):
            wanted = min(2 * num, len(order))
            following = race.affordable(num, wanted)
            if following < wanted:
                race.ranking.is_cut = True
            if following < min(_WORTH_IT * num, len(order)):
                break
            num = following
            race.play(num)
    except OutOfTime:
        race.ranking.is_cut = True
    race.ranking.standings = race.standings()
    return race.ranking


def first_round(num_images: int, num_classes: int, num_networks: int) -> int:
    """Return how many images the first round has, so that the round of the last two networks has all of them."""
    num_rounds = max(1, math.ceil(math.log2(max(2, num_networks))))
    return min(num_images, max(_fewest_images(num_classes), num_images // 2 ** (num_rounds - 1)))


def _fewest_images(num_classes: int) -> int:
    return min(_MOST_OF_FIRST_ROUND, max(FEWEST_IMAGES, _FEWEST_OF_CLASS * num_classes))


def stratified_order(labels: NDArray[np.integer], seed: int) -> NDArray[np.int64]:
    """Return an order of the images, (N,), of which each beginning has about the same shares of the classes."""
    rng = np.random.default_rng(seed)
    places = np.empty(len(labels))
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        places[rows] = (np.arange(len(rows)) + rng.random()) / len(rows)
    return np.argsort(places, kind="stable")


def held_out(
    features: NDArray[np.floating], labels: NDArray[np.integer], num_classes: int
) -> tuple[float, float]:
    """Return log loss and accuracy of a head's cross-validated predictions, at the better of a few strengths.

    Few images are dealt to folds twice, which makes their scores more certain.

    Args:
        features: (N, D).
        labels: (N,).
        num_classes: K.
    """
    loss, accuracy, _ = _best_strength(features, labels, num_classes)
    return loss, accuracy


def fitted_head(
    features: NDArray[np.floating], labels: NDArray[np.integer], num_classes: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return weight (K, D) and bias (K,) of a head on all of these images, at the strength that `held_out` takes."""
    strength = _best_strength(features, labels, num_classes)[2]
    return fit_head(np.asarray(features, np.float64), labels, num_classes, strength)


def _best_strength(
    features: NDArray[np.floating], labels: NDArray[np.integer], num_classes: int
) -> tuple[float, float, float]:
    """Return log loss and accuracy at the best strength, and that strength."""
    x = _rotated(features)
    deals = [_folds(labels, seed) for seed in range(2 if len(labels) <= _FEW_IMAGES else 1)]
    scores = []
    for strength in _STRENGTHS:
        found = [_cross_validated(x, labels, num_classes, strength, folds) for folds in deals]
        loss, accuracy = np.mean(found, axis=0).tolist()
        scores.append((loss, accuracy, strength))
    return min(scores)


def _folds(labels: NDArray[np.integer], seed: int) -> NDArray[np.int64]:
    """Deal the images of each class to the folds at random, (N,)."""
    rng = np.random.default_rng(seed)
    folds = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        folds[rows] = (label + np.arange(len(rows))) % _NUM_FOLDS
    return folds


def _cross_validated(
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
        fitted = held if held.all() else ~held  # of a single image that one
        weight, bias = fit_head(x[fitted], labels[fitted], num_classes, strength)
        log_probabilities = log_softmax(x[held] @ weight.T + bias, axis=1)
        losses[held] = -log_probabilities[np.arange(len(log_probabilities)), labels[held]]
        hits[held] = log_probabilities.argmax(axis=1) == labels[held]
    return float(losses.mean()), float(hits.mean())


class _Contender:
    """A network in the race."""

    def __init__(self, name: str, load: Callable[[], FeaturesOf]) -> None:
        self.name, self.load = name, load
        self.features_of: FeaturesOf | None = None
        self.parts: list[NDArray[np.floating]] = []  # features of the images of all rounds so far
        self.standing: Standing | None = None

    def loss(self) -> float:
        assert self.standing is not None
        return self.standing.loss

    def play(
        self,
        chosen: NDArray[np.integer],
        labels: NDArray[np.integer],
        num_classes: int,
        deadline: float | None,
    ) -> None:
        """Set the standing on these images, of which those of the rounds before are the first."""
        began = time.monotonic()
        if self.features_of is None:
            self.features_of = self.load()
        num_known = sum(map(len, self.parts))
        part = self.features_of(chosen[num_known:], deadline)
        if not np.isfinite(part).all():
            raise Unusable("its features are not finite")
        self.parts.append(part)
        loss, accuracy = held_out(np.concatenate(self.parts), labels[chosen], num_classes)
        before = self.standing.seconds if self.standing else 0.0
        self.standing = Standing(
            self.name, accuracy, loss, len(chosen), before + time.monotonic() - began
        )


class _Race:
    """Networks that are compared on the same images, round by round.

    Attributes:
        contenders: Those that are not eliminated; after a round the best is first.
        ranking: The result so far, without standings.
    """

    def __init__(
        self,
        contenders: list[_Contender],
        order: NDArray[np.integer],
        labels: NDArray[np.integer],
        num_classes: int,
        deadline: float,
    ) -> None:
        self.contenders = contenders
        self.ranking = Ranking(num_images=len(order))
        self._order = order
        self._labels = labels
        self._num_classes = num_classes
        self._deadline = deadline
        self._eliminated: list[_Contender] = []

    def play(self, num: int) -> None:
        """Try all contenders on the first `num` images, and eliminate the worse half.

        Raises:
            OutOfTime: The round was not finished. It does not count, unless it was the first: then the networks that
                were not tried are left out.
        """
        before = [contender.standing for contender in self.contenders]
        try:
            for contender in self.contenders:
                self._try(contender, num)
        except OutOfTime:
            if any(before):
                for contender, standing in zip(self.contenders, before, strict=True):
                    contender.standing = standing
            else:
                self.ranking.untried = [
                    c.name
                    for c in self.contenders
                    if c.standing is None and c.name not in self.ranking.unusable
                ]
            self._sort()
            raise
        self._sort()
        half = math.ceil(len(self.contenders) / 2)
        for contender in self.contenders[half:]:
            contender.features_of = None  # frees the network's memory
        self._eliminated = self.contenders[half:] + self._eliminated
        self.contenders = self.contenders[:half]

    def _try(self, contender: _Contender, num: int) -> None:
        """Try one network; the first that can be used has no deadline."""
        has_any = any(c.standing is not None for c in self.contenders)
        if has_any and time.monotonic() > self._deadline:
            raise OutOfTime
        deadline = self._deadline if has_any else None
        try:
            contender.play(self._order[:num], self._labels, self._num_classes, deadline)
        except Unusable as error:
            self.ranking.unusable[contender.name] = str(error)
            contender.standing = None

    def _sort(self) -> None:
        """Sort the contenders by loss, without those that have no standing."""
        usable = [contender for contender in self.contenders if contender.standing is not None]
        self.contenders = sorted(usable, key=_Contender.loss)

    def affordable(self, num: int, wanted: int) -> int:
        """Return how many images the next round can have: `wanted`, or fewer if these would take too long.

        Args:
            num: Images of the last round.
            wanted: Images that the next round should have.
        """
        rate = sum(standing.seconds / standing.num_images for standing in _found(self.contenders))
        seconds = max(0.0, self._deadline - time.monotonic())
        return num + int(min(wanted - num, seconds / max(rate, 1e-9)))

    def standings(self) -> list[Standing]:
        """Return the standings of all networks, the best first."""
        return _found(self.contenders + self._eliminated)


def _found(contenders: Sequence[_Contender]) -> list[Standing]:
    return [contender.standing for contender in contenders if contender.standing is not None]


def _rotated(features: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return features in as few dimensions as the images span: a regularised head predicts the same, sooner.

    Computed by torch, because waiting threads of NumPy take processor time.
    """
    x = torch.from_numpy(np.asarray(features, np.float64))
    x = x - x.mean(dim=0)
    if len(x) >= x.shape[1]:
        return x.numpy()
    values, vectors = torch.linalg.eigh(x @ x.T)
    kept = values > 1e-12 * values[-1].clamp(min=1e-300)
    return (vectors[:, kept] * values[kept].sqrt()).numpy()
