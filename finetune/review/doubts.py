"""The order of a review: images whose labels are doubtful first, each with a reason."""

# Shapes: N images, K classes.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from finetune.data.datasets.listing import Listing
from finetune.runs.answers import Answers

_TWO_CLASSES, _DOUBTFUL, _LEAK, _UNREADABLE, _OTHERS = range(5)


@dataclass(frozen=True)
class Evidence:
    """What is known about the labels of N images.

    Attributes:
        labels: Class index of each image now, (N,).
        probabilities: Out-of-fold probability of each class, (N, K); NaN for an image without features. None if there
            are no features.
        copies: Sets of images that show the same photograph.
        mistakes: Images that a run has predicted wrongly: the predicted class and the probability of the label.
        errors: Why an image cannot be decoded.
    """

    labels: NDArray[np.int64]
    probabilities: NDArray[np.float64] | None = None
    copies: Sequence[Sequence[int]] = ()
    mistakes: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Order:
    """The images of a review in order.

    Attributes:
        images: Index of each image, in order, (N,).
        reasons: Why an image is doubtful. All others have no reason.
    """

    images: NDArray[np.int64]
    reasons: dict[int, str]

    @property
    def num_doubtful(self) -> int:
        """Number of doubtful images. They are the first ones."""
        return len(self.reasons)


def order_images(listing: Listing, evidence: Evidence) -> Order:
    """Return the images in the order of a review.

    First come sets of copies in several classes, at least one of which has a wrong label. Then images that the other
    images or a run assign to another class, the least probable label first. Then copies in several splits, unreadable
    images, and all others.
    """
    num = len(listing.paths)
    tiers = np.full(num, _OTHERS)
    keys = _probability_of_labels(evidence, num)
    reasons: dict[int, str] = {}
    names = listing.class_names
    for i in _images_in_doubt(evidence, keys):
        tiers[i] = _DOUBTFUL
        reasons[i] = _reason_of_doubt(i, evidence, names)
    for i, error in evidence.errors.items():
        tiers[i] = _UNREADABLE
        reasons[i] = f"cannot be decoded: {error}"
    for number, members in enumerate(evidence.copies):
        labels = {int(evidence.labels[i]) for i in members}
        splits = {int(listing.split_of[i]) for i in members}
        for i in members:
            if len(labels) > 1:
                tiers[i] = _TWO_CLASSES
                others = [names[k] for k in sorted(labels - {int(evidence.labels[i])})]
                reasons[i] = f"the same image is also in {', '.join(others)}"
                keys[i] = number
            elif len(splits) > 1 and tiers[i] != _DOUBTFUL:
                tiers[i] = _LEAK
                others = [listing.splits[k] for k in sorted(splits - {int(listing.split_of[i])})]
                reasons[i] = f"the same image is also in the {', '.join(others)} split"
                keys[i] = number
    images = np.lexsort((np.arange(num), keys, tiers))
    return Order(images.astype(np.int64), reasons)


def _probability_of_labels(evidence: Evidence, num: int) -> NDArray[np.float64]:
    """Return the lowest probability that anything gives the label of each image, (N,); 1 if nothing is known."""
    keys = np.ones(num)
    if evidence.probabilities is not None:
        given = evidence.probabilities[np.arange(num), evidence.labels]
        keys = np.where(np.isnan(given), 1.0, given)
    for i, (_, probability) in evidence.mistakes.items():
        keys[i] = min(keys[i], probability)
    return keys


def _images_in_doubt(evidence: Evidence, keys: NDArray[np.float64]) -> list[int]:
    in_doubt = np.zeros(len(keys), bool)
    if evidence.probabilities is not None:
        known = ~np.isnan(evidence.probabilities).any(axis=1)
        best = np.where(known, np.nan_to_num(evidence.probabilities).argmax(axis=1), -1)
        in_doubt = known & (best != evidence.labels)
    in_doubt[list(evidence.mistakes)] = True
    return np.flatnonzero(in_doubt).tolist()


def _reason_of_doubt(i: int, evidence: Evidence, names: Sequence[str]) -> str:
    parts = []
    if evidence.probabilities is not None and not np.isnan(evidence.probabilities[i]).any():
        best = int(evidence.probabilities[i].argmax())
        if best != evidence.labels[i]:
            parts.append(f"similar images suggest {names[best]}")
    if i in evidence.mistakes:
        parts.append(f"the run predicts {names[evidence.mistakes[i][0]]}")
    return "; ".join(parts)


def find_mistakes(
    answers: Answers, index_of: Mapping[str, int], labels: NDArray[np.int64], names: Sequence[str]
) -> dict[int, tuple[int, float]]:
    """Return the images that a run has predicted wrongly: the predicted class and the probability of the label.

    Args:
        answers: The predictions of the run for its test images.
        index_of: The index of each image of the review by its real path.
        labels: Class index of each image of the review, (N,).
        names: The classes of the review.
    """
    number = {name: k for k, name in enumerate(names)}
    mistakes = {}
    for row, path in enumerate(answers.paths):
        i = index_of.get(path)
        predicted = number.get(answers.class_names[int(answers.predicted[row])])
        if i is None or predicted is None or predicted == labels[i]:
            continue
        probability = 1 - float(answers.confidence[row])
        name = names[int(labels[i])]
        if answers.probabilities is not None and name in answers.class_names:
            probability = float(answers.probabilities[row, answers.class_names.index(name)])
        mistakes[i] = (predicted, probability)
    return mistakes
