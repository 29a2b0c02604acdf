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
    deadline = time.monotonic() + seconds
    order = stratified_order(labels, seed)[: max(MOST_IMAGES, _fewest_images(num_classes))]
    contenders = [_Contender(name, load) for name, load in networks.items()]
    ranking = Ranking(num_images=len(order))
    eliminated: list[_Contender] = []
    num = first_round(len(order), num_classes, len(contenders))
    while True:
        is_finished = _play(contenders, order[:num], labels, num_classes, ranking, deadline)
        contenders = sorted((c for c in contenders if c.standing is not None), key=_Contender.loss)
        if not is_finished or len(contenders) < 2 or num == len(order):
            break
        half = math.ceil(len(contenders) / 2)
        eliminated = contenders[half:] + eliminated
        for contender in contenders[half:]:
            contender.features_of = None  # frees the network's memory
        contenders = contenders[:half]
        if len(contenders) == 1:
            break
        following = _affordable(
            contenders, num, min(2 * num, len(order)), deadline - time.monotonic()
        )
        ranking.is_cut |= following < min(2 * num, len(order))
        if following < min(_WORTH_IT * num, len(order)):
            break
        num = following
    ranking.standings = [c.standing for c in contenders + eliminated if c.standing is not None]
    return ranking


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


def _play(
    contenders: Sequence[_Contender],
    chosen: NDArray[np.integer],
    labels: NDArray[np.integer],
    num_classes: int,
    ranking: Ranking,
    deadline: float,
) -> bool:
    """Let all contenders play a round, and return whether all did; if time runs out after the first, none counts."""
    before = [contender.standing for contender in contenders]
    is_first = all(standing is None for standing in before)
    for contender in contenders:
        has_any = not is_first or any(c.standing is not None for c in contenders)
        try:
            if has_any and time.monotonic() > deadline:
                raise OutOfTime
            contender.play(chosen, labels, num_classes, deadline if has_any else None)
        except Unusable as error:
            ranking.unusable[contender.name] = str(error)
            contender.standing = None
        except OutOfTime:
            ranking.is_cut = True
            if is_first:
                ranking.untried = [
                    c.name
                    for c in contenders
                    if c.standing is None and c.name not in ranking.unusable
                ]
            else:
                for other, standing in zip(contenders, before, strict=True):
                    other.standing = standing
            return False
    return True


def _affordable(contenders: Sequence[_Contender], num: int, wanted: int, seconds: float) -> int:
    """Return how many images the next round can have: `wanted`, or fewer if they would take too long."""
    rate = sum(
        c.standing.seconds / c.standing.num_images for c in contenders if c.standing is not None
    )
    return num + int(min(wanted - num, max(0.0, seconds) / max(rate, 1e-9)))


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
