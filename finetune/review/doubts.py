"""The order of a review: images whose labels are doubtful first, each with a reason; without labels, the questions."""

# Shapes: N images, K classes.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from finetune.data.data_set import DataSet, label_set_name
from finetune.runs.predictions_table import Predictions


class _Tier(IntEnum):
    """Parts of a review, in order."""

    CONTRADICTION = 0  # copies with different labels
    DOUBTFUL = 1  # other images or a run suggest other labels
    LEAK = 2  # copies in several splits
    UNREADABLE = 3
    OTHERS = 4


@dataclass(frozen=True)
class Evidence:
    """What is known about the labels of N images.

    Attributes:
        labels: Class index of each image now, (N,). If images have several labels, (N, K), 0 or 1.
        probabilities: Out-of-fold probability of each class, (N, K). NaN for an image without features, and for a class
            that a head cannot learn. None if there are no features.
        copies: Sets of images that show the same photograph.
        mistakes: Images that a run has predicted wrongly: the predicted labels and the probability of the image's own.
        errors: Why an image cannot be decoded.
        questions: The order of images that have no labels, (N,); None if they have.
        accuracy: How many of a random sample of these a head of the answers predicts right, how many of it have an
            answer, and its size.
    """

    labels: NDArray[np.integer]
    probabilities: NDArray[np.float64] | None = None
    copies: Sequence[Sequence[int]] = ()
    mistakes: Mapping[int, tuple[str, float]] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)
    questions: NDArray[np.int64] | None = None
    accuracy: tuple[int, int, int] = (0, 0, 0)

    @property
    def has_several(self) -> bool:
        """Whether images have several labels."""
        return self.labels.ndim == 2

    def label_sets(self) -> NDArray[np.int64]:
        """Return a number for the labels of each image, (N,). Images with equal labels have the same."""
        if not self.has_several:
            return self.labels.astype(np.int64)
        return np.unique(self.labels, axis=0, return_inverse=True)[1].reshape(-1)

    def names_of(self, i: int, names: Sequence[str]) -> str:
        """Return the labels of image i as a text."""
        return label_set_name([names[int(k)] for k in _classes_of(self.labels[i])])


@dataclass(frozen=True)
class Order:
    """The images of a review in order.

    Attributes:
        images: Index of each image, in order, (N,).
        reasons: Why an image is doubtful. All others have no reason.
    """

    images: NDArray[np.int64]
    reasons: dict[int, str]

    def after(self, earlier: "Order", is_shown: NDArray[np.bool_]) -> "Order":
        """Return this order, but with images that people have seen before all others, in the earlier order.

        Args:
            earlier: The order until now. The images that were shown have its reasons.
            is_shown: Whether people have seen each image, (N,).
        """
        shown_before = earlier.images[is_shown[earlier.images]]
        others = self.images[~is_shown[self.images]]
        reasons = {i: reason for i, reason in earlier.reasons.items() if is_shown[i]}
        reasons |= {i: reason for i, reason in self.reasons.items() if not is_shown[i]}
        return Order(np.concatenate([shown_before, others]), reasons)


def order_images(data: DataSet, evidence: Evidence) -> Order:
    """Return the images in the order of a review.

    First come sets of copies with different labels, at least one of which is wrong. Then images for which the other
    images or a run suggest other labels, the least probable label first. Then copies in several splits, unreadable
    images, and all others.
    """
    if evidence.questions is not None:
        return Order(evidence.questions, {})
    num = len(data.paths)
    tiers = np.full(num, _Tier.OTHERS)
    # order within a tier: by the probability of the labels, copies by the number of their set
    keys, in_doubt = _doubts(evidence)
    reasons: dict[int, str] = {}
    names = data.class_names
    for i in np.flatnonzero(in_doubt).tolist():
        tiers[i] = _Tier.DOUBTFUL
        reasons[i] = _reason_of_doubt(i, evidence, names)
    for i, error in evidence.errors.items():
        tiers[i] = _Tier.UNREADABLE
        reasons[i] = f"cannot be decoded: {error}"
    label_sets = evidence.label_sets()
    for number, members in enumerate(evidence.copies):
        example = {int(label_sets[i]): i for i in members}
        splits = {int(data.split_of[i]) for i in members}
        for i in members:
            if len(example) > 1:
                tiers[i] = _Tier.CONTRADICTION
                others = [example[k] for k in sorted(example) if k != label_sets[i]]
                texts = [evidence.names_of(j, names) for j in others]
                reasons[i] = f"the same image is also in {', '.join(texts)}"
                keys[i] = number
            elif len(splits) > 1 and tiers[i] != _Tier.DOUBTFUL:
                tiers[i] = _Tier.LEAK
                of_others = [list(data.splits)[k] for k in sorted(splits - {int(data.split_of[i])})]
                reasons[i] = f"the same image is also in the {', '.join(of_others)} split"
                keys[i] = number
    images = np.lexsort((np.arange(num), keys, tiers))
    return Order(images.astype(np.int64), reasons)


def _classes_of(labels: NDArray[np.integer]) -> NDArray[np.integer]:
    """Return the classes of an image, from the index of its class or from whether it has each label (K,)."""
    return labels.reshape(1) if labels.ndim == 0 else np.flatnonzero(labels)


def _doubts(evidence: Evidence) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the lowest probability that anything gives a label of each image, (N,), and whether it is in doubt, (N,).

    The probability is 1 if nothing is known. The other images or a run suggest other labels for an image in doubt.
    """
    num = len(evidence.labels)
    lowest = np.ones(num)
    in_doubt: NDArray[np.bool_] = np.zeros(num, bool)
    p = evidence.probabilities
    if p is not None and evidence.has_several:
        agreement = np.where(evidence.labels == 1, p, 1 - p)
        lowest = np.where(np.isnan(agreement), 1.0, agreement).min(axis=1)
        in_doubt = np.asarray((agreement < 0.5).any(axis=1))  # NaN is not below
    elif p is not None:
        own = p[np.arange(num), evidence.labels]
        lowest = np.where(np.isnan(own), 1.0, own)
        in_doubt = np.asarray((p > own[:, None]).any(axis=1))
    for i, (_, probability) in evidence.mistakes.items():
        lowest[i] = min(lowest[i], probability)
        in_doubt[i] = True
    return lowest, in_doubt


def _reason_of_doubt(i: int, evidence: Evidence, names: Sequence[str]) -> str:
    """Return which labels the other images and a run suggest for image i."""
    parts = []
    if evidence.probabilities is not None:
        suggested = _suggested(evidence.probabilities[i], evidence.labels[i], names)
        if suggested:
            parts.append(f"similar images suggest {suggested}")
    if i in evidence.mistakes:
        parts.append(f"the run predicts {evidence.mistakes[i][0]}")
    return "; ".join(parts)


def _suggested(p: NDArray[np.float64], labels: NDArray[np.integer], names: Sequence[str]) -> str:
    """Return how the labels of an image should change by the probability of each class (K,); "" for not at all."""
    if labels.ndim == 0:
        best = int(p.argmax())
        return "" if np.isnan(p).any() or best == labels else names[best]
    added = [names[k] for k in np.flatnonzero((p > 0.5) & (labels == 0)).tolist()]
    removed = [f"not {names[k]}" for k in np.flatnonzero((p < 0.5) & (labels == 1)).tolist()]
    return ", ".join(added + removed)


def find_mistakes(
    predictions: Predictions,
    tested: Sequence[int | None],
    labels: NDArray[np.integer],
    names: Sequence[str],
) -> dict[int, tuple[str, float]]:
    """Return the images that a run has predicted wrongly.

    The values are the predicted class or labels, and the lowest probability that a label of the image, or its absence,
    is right.

    Args:
        predictions: Those of the run for its test images.
        tested: The index of each test image in the review; None if it is not there.
        labels: The labels of each image of the review, as in `Evidence`.
        names: The classes of the review, (K,).
    """
    mistakes = {}
    for row, i in enumerate(tested):
        if i is None:
            continue
        stated = {names[int(k)] for k in _classes_of(labels[i])}
        decided = predictions.named(predictions.decided[row])
        if {*decided} == stated or not {*decided} <= {*names}:
            continue
        p = predictions.probabilities[row]
        is_stated = [name in stated for name in predictions.names]
        mistakes[i] = (label_set_name(decided), float(np.where(is_stated, p, 1 - p).min()))
    return mistakes
