"""The prediction for one image."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image.

    Attributes:
        label: The predicted class; `unsure` if its probability is below `abstain_below`.
        probability: Probability of the predicted class, also where the label is `unsure`.
        probabilities: Probability of each class, by name, in the order of `class_names`.
        path: The image's file, if it was read from one.
        index: The image's position among those passed; each file of a folder or glob counts.
    """

    label: str
    probability: float
    probabilities: dict[str, float] = field(hash=False)
    path: str | None = None
    index: int = 0

    @property
    def unsure(self) -> bool:
        """Whether the label is `unsure`."""
        return self.label not in self.probabilities
