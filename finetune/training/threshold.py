"""The decision threshold for two classes, chosen for an aim on the validation split."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from finetune.system.file_names import composed
from finetune.system.messages import WrongUsage

RATES = ("precision", "recall")  # measures for which an aim states the least value
MEASURES = ("accuracy", "f1", *RATES)
_FORMS = "accuracy, f1, precision:P or recall:P with P above 0 and at most 1, and :CLASS behind it if not the first's"


class Aim(NamedTuple):
    """What a threshold is chosen for.

    Attributes:
        measure: accuracy, f1, precision or recall.
        least: The least acceptable precision or recall; None for the other measures, which are maximized.
        positive: Index of the class to which threshold, precision, recall and F1 refer.
    """

    measure: str
    least: float | None
    positive: int


class Choice(NamedTuple):
    """The threshold that was chosen for an aim.

    Attributes:
        value: The class is predicted if its probability is at least this; None if the aim can't be reached.
        reached: The measure at this threshold, or its largest value if the aim can't be reached; None if all images
            have the same class.
    """

    value: float | None
    reached: float | None


def parse_aim(text: str, class_names: Sequence[str]) -> Aim:
    """Parse the value of `--threshold`, such as `recall:0.99` or `f1:hotdog`.

    Raises:
        WrongUsage: The value has another form.
        ValueError: It names an unknown class, or the number of classes is not two.
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
    """Return the best threshold for an aim.

    For accuracy and F1 it is the one with the highest value. For precision it is the one with the highest recall among
    those that reach the aim, and for recall the one with the highest precision. Candidates are halfway between
    neighbouring probabilities. Among equally good ones the nearest to 0.5 is taken.

    Args:
        aim: What the threshold is chosen for.
        probabilities: Probability of the positive class for each image, (N,) float64, in any order.
        is_positive: Whether the label of each image is the positive class, (N,) bool.
    """
    if is_positive.all() or not is_positive.any():
        return Choice(None, None)
    order = np.argsort(-probabilities, kind="stable")
    # the probabilities above and below each candidate
    above, below = np.append(1.0, probabilities[order]), np.append(probabilities[order], 0.0)
    is_between = above > below  # there is no threshold between equal probabilities
    num_predicted = np.arange(len(above))[is_between]
    num_hits = np.append(0, np.cumsum(is_positive[order]))[is_between]
    middle = (above + below)[is_between] / 2
    # between neighbouring floats the middle is rounded to one of them
    values = np.where(middle > below[is_between], middle, above[is_between])
    num, num_positive = len(probabilities), int(is_positive.sum())
    precision = num_hits / np.maximum(num_predicted, 1)
    recall = num_hits / num_positive
    # correct: the hits, and the images of the other class that are not predicted as this one
    accuracy = (num - num_positive + 2 * num_hits - num_predicted) / num
    f1 = 2 * num_hits / (num_predicted + num_positive)
    measured = {"accuracy": accuracy, "f1": f1, "precision": precision, "recall": recall}
    own = measured[aim.measure]
    is_met = own >= (own.max() if aim.least is None else aim.least)
    if not is_met.any():
        return Choice(None, float(own.max()))
    other = {"precision": recall, "recall": precision}.get(aim.measure, own)
    is_best = is_met & (other == other[is_met].max())
    best = np.flatnonzero(is_best)[np.abs(values[is_best] - 0.5).argmin()]
    return Choice(float(values[best]), float(own[best]))
