"""What is said of one picture."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Prediction:
    """What is said of one picture.

    Attributes:
        label: The class that is said; `unsure` where it is less probable than `abstain_below`.
        probability: Of that class; where it is unsure, of the one that would have been said.
        probabilities: Of each class, by name, in the order of `class_names`.
        path: The picture's file, where it came from one.
        index: The picture's place among those that were asked for, a folder's or glob's files counted each.
    """

    label: str
    probability: float
    probabilities: dict[str, float] = field(hash=False)
    path: str | None = None
    index: int = 0

    @property
    def unsure(self) -> bool:
        """Whether no class is said."""
        return self.label not in self.probabilities
