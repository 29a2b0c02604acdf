"""The record of the choice among interpolated weights (see `finetune.training.interpolation`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METRICS = ("accuracy", "mAP")  # metrics of candidates; these names are keys in checkpoints


@dataclass(frozen=True)
class InterpolatedWeights:
    """Weights on the line between start and end, measured on the validation images.

    Attributes:
        share: Position on the line, from 0 for the start to 1 for the end.
        loss: Mean negative log probability of the labels at the fitted temperature.
        score: The metric by which the best epoch was chosen: the accuracy, or the mean average precision.
    """

    share: float
    loss: float
    score: float


@dataclass(frozen=True)
class Interpolation:
    """The candidates and the choice among them.

    Attributes:
        share: The share of the chosen candidate.
        candidates: All candidates, in the order of their shares.
        num_images: Number of validation images on which they were measured.
        metric: The metric of the scores: `accuracy` or `mAP`.
    """

    share: float
    candidates: tuple[InterpolatedWeights, ...]
    num_images: int
    metric: str = "accuracy"

    def as_plain(self) -> dict[str, Any]:
        """Return the record as plain values, for a checkpoint and test.json."""
        return {
            "share": self.share,
            "num_images": self.num_images,
            "candidates": [
                {"share": one.share, "loss": one.loss, self.metric: one.score}
                for one in self.candidates
            ],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Interpolation":
        """Return the record of a result of `as_plain`. The values were checked when the checkpoint was read."""
        metric = next(name for name in METRICS if name in plain["candidates"][0])
        candidates = tuple(
            InterpolatedWeights(one["share"], one["loss"], one[metric])
            for one in plain["candidates"]
        )
        return cls(plain["share"], candidates, plain["num_images"], metric)

    def weights(self, epoch: int) -> str:
        """Return which weights best.ckpt has, in few words.

        Args:
            epoch: The epoch of the fine-tuned weights, counted from one.
        """
        if self.share == 0:
            return "before training"
        if self.share == 1:
            return f"epoch {epoch}"
        return f"{100 * self.share:.0f} % of the way to epoch {epoch}"

    def message(self, epoch: int | None = None) -> str:
        """Return a sentence on the weights of best.ckpt and why they were chosen.

        Args:
            epoch: The epoch of the fine-tuned weights, counted from one; None if it is unknown.
        """
        by_share = {candidate.share: candidate for candidate in self.candidates}
        of_epoch = "" if epoch is None else f" of epoch {epoch}"
        if self.share == 0:
            weights = "the weights before training (frozen features, fitted head)"
        elif self.share == 1:
            weights = f"the fine-tuned weights{of_epoch}"
        else:
            way = f"{100 * self.share:.0f} % of the way from the start to the fine-tuned weights{of_epoch}"
            weights = f"{way}, since neither is clearly better"
        names = {"before training": 0.0, "fine-tuned": 1.0, "chosen": self.share}
        values = ", ".join(f"{name} {self._values(by_share[at])}" for name, at in names.items())
        comma = "" if 0 < self.share < 1 else ","
        return f"{weights}{comma} by the loss on {self.num_images} validation images: {values}"

    def _values(self, candidate: InterpolatedWeights) -> str:
        """Return the loss and the score of a candidate."""
        is_accuracy = self.metric == "accuracy"
        score = f"{100 * candidate.score:.1f} %" if is_accuracy else f"{candidate.score:.3f}"
        return f"{candidate.loss:.4f} ({self.metric} {score})"

    @property
    def chosen_score(self) -> float:
        """The score of the chosen candidate."""
        return next(one.score for one in self.candidates if one.share == self.share)
