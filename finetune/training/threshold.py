"""Decision thresholds, chosen for an aim on the validation split: for two classes, or for each of several labels."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from finetune.settings.schema import LabelKind
from finetune.system.file_names import composed
from finetune.system.messages import WrongUsage

RATES = ("precision", "recall")  # measures for which an aim states the least value
MEASURES = ("accuracy", "f1", *RATES)
_FORM = "pass accuracy, f1, precision:P or recall:P, with P above 0 and at most 1"


class Aim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a threshold is chosen for.

    Attributes:
        measure: The measure.
        least: The least acceptable precision or recall; None for the other measures, which are maximized.
        positive: Index of the class to which threshold, precision, recall and F1 refer; None for each of several
            labels.
    """

    measure: Literal["accuracy", "f1", "precision", "recall"]
    least: Annotated[float, Meta(ge=0, le=1)] | None = None
    positive: Annotated[int, Meta(ge=0, le=1)] | None = None

    def __str__(self) -> str:
        return self.measure if self.least is None else f"{self.measure} {self.least:g}"

    def is_reached(self, is_predicted: np.ndarray, is_positive: np.ndarray) -> bool:
        """Return whether predictions reach the aim; true if no image is positive.

        Args:
            is_predicted: Whether each image is predicted as positive, (N,) bool.
            is_positive: Whether it is, (N,) bool.
        """
        if self.least is None or not is_positive.any():
            return True
        total = is_positive.sum() if self.measure == "recall" else max(1, is_predicted.sum())
        return bool((is_predicted & is_positive).sum() / total >= self.least)


class Choice(NamedTuple):
    """The threshold that was chosen for an aim.

    Attributes:
        value: The class is predicted if its probability is at least this; None if the aim cannot be reached.
        reached: The measure at this threshold, or its largest value if the aim cannot be reached; None if all images
            have the same class.
    """

    value: float | None
    reached: float | None


def check_form(text: str) -> tuple[Aim, str]:
    """Parse the value of `--threshold` as far as that is possible without classes.

    Returns:
        The aim without a class, and the name of a class; "" if there is none.

    Raises:
        WrongUsage: The value has another form.
    """
    measure, _, name = text.partition(":")
    least = None
    if measure in RATES:
        number, _, name = name.partition(":")
        try:
            least = float(number)
        except ValueError:
            least = math.nan
    if measure not in MEASURES or (least is not None and not 0 < least <= 1):
        raise WrongUsage(f"--threshold {text}: {_FORM}; add :CLASS for the second of two classes")
    return Aim(measure, least), name  # type: ignore[arg-type] # checked above


def parse_aim(text: str, class_names: Sequence[str], label_kind: LabelKind = "single") -> Aim:
    """Parse the value of `--threshold`, such as `recall:0.99` or `f1:hotdog`.

    Raises:
        WrongUsage: The value has another form, or names one of several labels.
        ValueError: It names an unknown class, or the number of classes is not two.
    """
    aim, name = check_form(text)
    if label_kind == "several":
        if name:
            raise WrongUsage(f"--threshold {text}: {_FORM}, which is applied to each label")
        return aim
    if len(class_names) != 2:
        raise ValueError(f"--threshold is for two classes, these are {len(class_names)}")
    names = list(map(composed, class_names))
    if name and composed(name) not in names:
        raise ValueError(
            f"--threshold {text}: there is no class {name!r}; there are {' and '.join(class_names)}"
        )
    return msgspec.structs.replace(aim, positive=names.index(composed(name)) if name else 0)


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
    above = np.append(1.0, probabilities[order])
    below = np.append(probabilities[order], 0.0)
    is_between = above > below  # there is no threshold between equal probabilities
    is_between[-1] = True  # all images, also those with the probability 0
    num_predicted = np.arange(len(above))[is_between]
    num_hits = np.append(0, np.cumsum(is_positive[order]))[is_between]
    middle = (above + below)[is_between] / 2
    # between neighbouring floats the middle is rounded to one of them
    values = np.where(middle > below[is_between], middle, above[is_between])
    num = len(probabilities)
    num_positive = int(is_positive.sum())
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
