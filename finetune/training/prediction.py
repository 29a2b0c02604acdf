"""The prediction for an image, made in one place for files, Python and the service.

`predict` and `test` write a row for each, `finetune.load` returns them, and `serve` answers with them. A column is a
field of `Prediction` that `column` declares: how it is computed, and for which networks. Files, the printed prediction,
the answers of the service and their OpenAPI description are loops over the columns.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from finetune.features.familiarity import Familiarity, check_none_below
from finetune.system.messages import WrongUsage
from finetune.training.calibration import Calibration

# Shapes: B images, K classes or labels.

UNSURE = "unsure"  # predicted instead of a class that is not probable enough
NONE = "none"  # predicted instead of a class for an image that is not familiar enough
ONE_CLASS = "is for one class per image, and this network predicts several labels"
_DIGITS = 7  # of a probability


def column(
    compute: Callable[["Scores"], list[Any]],
    exists: Callable[["DecisionRule"], bool] = lambda rule: True,
) -> Any:
    """Declare a column of predictions. Its text is that of the attribute in the docstring.

    Args:
        compute: Returns the value of each image from their scores, B numbers or tuples of class names.
        exists: Whether the images of a network have it.
    """
    return field(default=None, metadata={"compute": compute, "exists": exists})


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image.

    Attributes:
        label: The predicted class, by the threshold if there is one. `none` if `familiar` is below `none_below`, and
            `unsure` if its probability is below `abstain_below`. Only of a network with one class per image.
        probability: Probability of the predicted class, also where the label is `unsure` or `none`. Only of such a
            network.
        labels: The labels whose probability is at least their threshold, in the order of `class_names`. Of a network
            with one class per image, a tuple of the predicted class, also where the label is `unsure` or `none`.
        probabilities: Probability of each class or label, by name, in the order of `class_names`.
        thresholds: Threshold of each label, by name; None with one class per image.
        abstention: `unsure` or `none`, if it is predicted instead of the class; else "".
        path: The image's file, if it was read from one.
        index: The image's position among those passed; each file of a folder or glob counts.
        set: The prediction set, the most probable first, which has the true class for the share `coverage` of images.
            Absent (None in Python) without a coverage.
        familiar: The share of the validation images that are at most as similar to the training images as this one.
            Below 0.05 the image may be of none of the classes. Absent (None in Python) if the model does not know.
    """

    labels: tuple[str, ...]
    probabilities: dict[str, float] = field(hash=False)
    thresholds: dict[str, float] | None = field(default=None, hash=False, repr=False)
    abstention: str = ""
    path: str | None = None
    index: int = 0
    set: tuple[str, ...] | None = column(
        lambda scores: scores.sets(), lambda rule: rule.coverage is not None
    )
    familiar: float | None = column(
        lambda scores: scores.familiar.tolist(), lambda rule: rule.familiarity is not None
    )

    def __repr__(self) -> str:
        is_single = self.thresholds is None
        first = ["label", "probability"] if is_single else []
        names = [*first, *(one.name for one in fields(self) if one.repr)]
        return f"Prediction({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def label(self) -> str:
        return self.abstention or self._class

    @property
    def probability(self) -> float:
        return self.probabilities[self._class]

    @property
    def _class(self) -> str:
        if self.thresholds is not None:
            raise AttributeError("the network predicts several labels: see `labels`")
        return self.labels[0]


def rounded(value: Any) -> Any:
    """Return the value of a column as it is written."""
    return round(value, _DIGITS) if isinstance(value, float) else value


@dataclass(frozen=True)
class DecisionRule:
    """How scores of images become predictions.

    Attributes:
        class_names: The classes or labels.
        calibration: That of the network.
        familiarity: That of the network; None if it is not known.
        coverage: The share of the prediction sets that are to have the true class; None for no sets.
        abstain_below: Predict `unsure` if the predicted class is less probable than that.
        none_below: Predict `none` if the image is less familiar than that.

    Raises:
        ValueError: The network cannot predict so, or a class has the name of what is predicted instead of a class.
    """

    class_names: Sequence[str]
    calibration: Calibration
    familiarity: Familiarity | None = None
    coverage: float | None = None
    abstain_below: float = 0.0
    none_below: float = 0.0

    def __post_init__(self) -> None:
        if self.coverage is not None:
            self.calibration.check_coverage(self.coverage)
        if not 0 <= self.abstain_below <= 1:
            raise WrongUsage(f"must be from 0 to 1, not {self.abstain_below}", "abstain_below")
        if self.abstain_below and not self.is_single:
            raise WrongUsage(ONE_CLASS, "abstain_below")
        if self.none_below:
            check_none_below(self.none_below, self.familiarity)
        for option, word in {"abstain_below": UNSURE, "none_below": NONE}.items():
            if getattr(self, option) and word in self.class_names:
                raise WrongUsage(
                    f"would predict {word}, which is one of the classes: omit it", option
                )

    @property
    def is_single(self) -> bool:
        """Whether each image has one class."""
        return self.calibration.label_kind == "single"

    @property
    def columns(self) -> "list[Field[Any]]":
        """The columns that images have."""
        return [
            one
            for one in fields(Prediction)
            if "exists" in one.metadata and one.metadata["exists"](self)
        ]

    def abstention(self, p: Sequence[float], chosen: Sequence[int], familiar: float | None) -> str:
        """Return what is predicted instead of the chosen class of an image; "" for nothing.

        Args:
            p: The probability of each class, K.
            chosen: The index of its class, or those of its labels.
            familiar: Its familiarity; None if it is not known.
        """
        if familiar is not None and familiar < self.none_below:
            return NONE
        return UNSURE if self.is_single and p[chosen[0]] < self.abstain_below else ""

    def of_groups(self) -> "DecisionRule":
        """Return the rule for groups of images, which have neither sets nor a familiarity."""
        return replace(self, familiarity=None, coverage=None, none_below=0.0)


class Scores:
    """What a network computes of images. Iterating makes their predictions one by one, which need more memory.

    Args:
        rule: How the images are predicted.
        probabilities: The calibrated probability of each class or label, (B, K) float64 on the CPU.
        familiar: The familiarity of each image, (B,) float64; empty if it is not known.
        index: The position of each image; None for 0 to B - 1.
    """

    def __init__(
        self,
        rule: DecisionRule,
        probabilities: Tensor,
        familiar: Tensor,
        index: Sequence[int] | None = None,
    ) -> None:
        self.rule = rule
        self.probabilities: Tensor = probabilities
        self.familiar: Tensor = familiar
        self.index = range(len(probabilities)) if index is None else index

    def __iter__(self) -> Iterator[Prediction]:
        rule = self.rule
        names = rule.class_names
        decided = rule.calibration.decide(self.probabilities).tolist()
        columns = {one.name: one.metadata["compute"](self) for one in rule.columns}
        thresholds = None
        if not rule.is_single:
            thresholds = dict(zip(names, rule.calibration.thresholds, strict=True))
        for row, p in enumerate(self.probabilities.tolist()):
            own = decided[row]
            chosen = [own] if rule.is_single else [k for k, has in enumerate(own) if has]
            values = {name: of_images[row] for name, of_images in columns.items()}
            yield Prediction(
                labels=tuple(names[k] for k in chosen),
                probabilities=dict(zip(names, p, strict=True)),
                thresholds=thresholds,
                abstention=rule.abstention(p, chosen, values.get("familiar")),
                index=self.index[row],
                **values,
            )

    def sets(self) -> list[tuple[str, ...]]:
        """Return the prediction set of each image, the most probable class first."""
        rule = self.rule
        assert rule.coverage is not None, "sets have a coverage"
        sets = rule.calibration.sets(self.probabilities, rule.coverage)
        return [tuple(rule.class_names[k] for k in one) for one in sets]
