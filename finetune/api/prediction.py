"""The prediction for one image: its class, or its labels if it may have several."""

from dataclasses import dataclass, field

from finetune.runs.prediction_rows import UNSURE


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image.

    Attributes:
        label: The predicted class; `none` if `familiar` is below `none_below`; `unsure` if its probability is below
            `abstain_below`.
        probability: Probability of the predicted class, also where the label is `unsure` or `none`.
        probabilities: Probability of each class, by name, in the order of `class_names`.
        path: The image's file, if it was read from one.
        index: The image's position among those passed; each file of a folder or glob counts.
        set: The prediction set, the most probable first; None without `coverage`.
        familiar: How much the image is like the training images: the share of the validation images that are as little
            like them, or less. None if the model does not know.
    """

    label: str
    probability: float
    probabilities: dict[str, float] = field(hash=False)
    path: str | None = None
    index: int = 0
    set: tuple[str, ...] | None = None
    familiar: float | None = None

    @property
    def unsure(self) -> bool:
        """Whether the label is `unsure`."""
        return self.label == UNSURE and UNSURE not in self.probabilities


@dataclass(frozen=True)
class LabelsPrediction:
    """The prediction for one image of a network for several labels an image.

    Attributes:
        labels: The labels whose probability is at least their threshold, in the order of `class_names`.
        probabilities: Probability of each label, by name, in the order of `class_names`.
        thresholds: Threshold of each label, by name.
        path: The image's file, if it was read from one.
        index: The image's position among those passed; each file of a folder or glob counts.
        set: The prediction set, the most probable first; None without `coverage`.
    """

    labels: tuple[str, ...]
    probabilities: dict[str, float] = field(hash=False)
    thresholds: dict[str, float] = field(hash=False, repr=False)
    path: str | None = None
    index: int = 0
    set: tuple[str, ...] | None = None
