"""From which probability on a class is said, of two: chosen by a stated aim on the validation split."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from finetune.system.file_names import composed
from finetune.system.messages import WrongUsage

RATES = ("precision", "recall")  # of which an aim says how much
MEASURES = ("accuracy", "f1", *RATES)
_FORMS = "accuracy, f1, precision:P or recall:P with P above 0 and at most 1, and :CLASS behind it if not the first's"


class Aim(NamedTuple):
    """What a threshold is chosen for.

    Attributes:
        measure: accuracy, f1, precision or recall.
        least: What precision or recall must come to; None for the others, of which the most is sought.
        positive: Index of the class that the threshold, precision, recall and F1 are about.
    """

    measure: str
    least: float | None
    positive: int


class Choice(NamedTuple):
    """What was found for an aim on some pictures.

    Attributes:
        value: The probability from which on the class is said; None where the aim can't be reached.
        reached: What the measure comes to there, or at most; None where all pictures were of one class.
    """

    value: float | None
    reached: float | None


def parse_aim(text: str, class_names: Sequence[str]) -> Aim:
    """Return what `--threshold` says, such as `recall:0.99` or `f1:hotdog`.

    Raises:
        WrongUsage: It says nothing of the kind.
        ValueError: It names none of the classes, or there are not two.
    """
    measure, _, rest = text.partition(":")
    least, name = None, rest
    if measure in RATES:
        number, _, name = rest.partition(":")
        try:
            least = float(number)
        except ValueError:
            least = math.nan
    if measure not in MEASURES or (least is not None and not 0 < least <= 1):
        raise WrongUsage(f"--threshold {text}: give {_FORMS}")
    if len(class_names) != 2:
        raise ValueError(f"--threshold is for two classes, these are {len(class_names)}")
    names = list(map(composed, class_names))
    if name and composed(name) not in names:
        raise ValueError(
            f"--threshold {text}: there is no class {name!r}; there are {' and '.join(class_names)}"
        )
    return Aim(measure, least, names.index(composed(name)) if name else 0)


def choose(aim: Aim, probabilities: np.ndarray, is_positive: np.ndarray) -> Choice:
    """Return the best of all thresholds for an aim: the measure's highest or, of a rate, the other's where it is met.

    A threshold lies halfway between the probabilities of two pictures, since what is between them is anybody's guess.
    Of equally good ones the nearest to 0.5 is taken.

    Args:
        aim: What is sought.
        probabilities: Of the class, (N,) float64, in any order.
        is_positive: Whether a picture is of the class, (N,) bool.
    """
    if is_positive.all() or not is_positive.any():
        return Choice(None, None)
    order = np.argsort(-probabilities, kind="stable")
    # of each threshold
    above, below = np.append(1.0, probabilities[order]), np.append(probabilities[order], 0.0)
    is_between = above > below  # not of equal ones
    said = np.arange(len(above))[is_between]
    hits = np.append(0, np.cumsum(is_positive[order]))[is_between]
    middle = (above + below)[is_between] / 2
    # neighbouring floats have no middle
    values = np.where(middle > below[is_between], middle, above[is_between])
    num, num_positive = len(probabilities), int(is_positive.sum())
    precision, recall = hits / np.maximum(said, 1), hits / num_positive
    # Right are the hits, and those of the other class that are not said to be of this one.
    accuracy, f1 = (num - num_positive + 2 * hits - said) / num, 2 * hits / (said + num_positive)
    measured = {"accuracy": accuracy, "f1": f1, "precision": precision, "recall": recall}
    own = measured[aim.measure]
    is_met = own >= (own.max() if aim.least is None else aim.least)
    if not is_met.any():
        return Choice(None, float(own.max()))
    other = {"precision": recall, "recall": precision}.get(aim.measure, own)
    is_best = is_met & (other == other[is_met].max())
    best = np.flatnonzero(is_best)[np.abs(values[is_best] - 0.5).argmin()]
    return Choice(float(values[best]), float(own[best]))
