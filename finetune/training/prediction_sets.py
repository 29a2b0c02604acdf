"""Prediction sets: the classes or labels that an image may have. A chosen share of the sets has the true one.

Split conformal prediction. Each class of an image has a score, and the set has the classes with a score of at most a
limit: of the n scores of validation images for their own class, in ascending order, the one of rank
ceil((n + 1) * share). If new images come as the validation images did, at least this share of the sets has the true
class, on average over validation images.

The score of a class is the probability of all classes that are more probable. So a set begins with the most probable
class, is never empty, and is larger for a doubtful image: the adaptive sets of Romano et al. 2020 (arXiv:2006.02544),
without random numbers (docs/decisions.md). Of several labels it is 1 - probability, with a limit for each label.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from finetune.settings.schema import LabelKind
from finetune.system.messages import counted, shown

# Shapes: N images, K classes or labels.

# In a checkpoint, for each label: 90 % are then at least 88.9 % in 95 of 100 fits.
MOST_SCORES = 2000


def set_scores(probabilities: Tensor, label_kind: LabelKind) -> Tensor:
    """Return the score of each class or label from the probabilities, (N, K) both."""
    if label_kind == "several":
        return 1 - probabilities
    p, order = probabilities.sort(dim=1, descending=True, stable=True)
    ahead = (p.cumsum(dim=1) - p).clamp(0, 1)
    return ahead.gather(1, order.argsort(dim=1))


def kept(scores: Tensor) -> tuple[float, ...]:
    """Return the scores of images (N,), ascending; of more than `MOST_SCORES` those of evenly spaced images."""
    num = min(len(scores), MOST_SCORES)
    return tuple(scores[torch.arange(num) * len(scores) // max(1, num)].sort().values.tolist())


def limit(scores: Sequence[float], share: float) -> float:
    """Return the highest score of a class in a set from ascending ones; infinity with fewer than `least_images`."""
    rank = math.ceil(round((len(scores) + 1) * share, 9))
    return scores[rank - 1] if rank <= len(scores) else math.inf


def least_images(share: float) -> int:
    """Return the number of validation images that sets for a share need."""
    return math.ceil(round(share / (1 - share), 9))


def check_enough(share: float, num: int, label_kind: LabelKind) -> None:
    """Raise a ValueError if there are too few validation images for sets of a share.

    Args:
        share: The share.
        num: Number of validation images, of several labels the largest number with one of them.
        label_kind: The kind of labels.
    """
    if not 0 < share < 1:
        raise ValueError(f"coverage {share:g}: it is above 0 and below 1")
    if num < least_images(share):
        images = "validation images" + (" with a label" if label_kind == "several" else "")
        why = " (without a validation split, or of joined folds, there are none)"
        raise ValueError(
            f"coverage {share:g} needs {least_images(share)} {images}, and there are {num}{'' if num else why}: take a "
            "lower coverage, or fit with a larger --data.val_fraction"
        )


def describe_sets(scores: Sequence[Sequence[float]], share: float, names: Sequence[str]) -> str:
    """Return in words what share of new images sets cover: it is beta distributed (Vovk 2012, arXiv:1209.2673).

    Args:
        scores: Those for all classes, or for each of several labels, of which some have enough images.
        share: The share.
        names: The classes or labels.
    """
    from scipy.special import betaincinv  # takes long to import

    least = least_images(share)
    lows = {}
    for k, num in enumerate(map(len, scores)):
        rank = math.ceil(round((num + 1) * share, 9))
        if num >= least:
            lows[k] = 100 * betaincinv(rank, num + 1 - rank, 0.05)
    k = min(lows, key=lambda k: lows[k])
    images = counted(len(scores[k]), "validation image")
    if len(scores) == 1:
        return f"sets cover at least {lows[k]:.1f} % of new images in 95 of 100 fits, with {images}"
    rare = ", ".join(shown(names[k]) for k in range(len(scores)) if k not in lows)
    always = f"; in every set, with fewer than {least}: {rare}" if rare else ""
    what = f"at least {lows[k]:.1f} % of the new images with each label"
    return (
        f"sets cover {what}, in 95 of 100 fits for each, with {images} of {shown(names[k])}{always}"
    )
