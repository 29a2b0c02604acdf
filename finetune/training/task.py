"""The classification task: what labels mean, and the loss, metrics and decisions that follow from it.

There are two tasks: each image has exactly one class (`SingleLabel`), or several labels or none (`MultiLabel`). The
training step, the evaluation and the callbacks of a run use only the methods that both have, through
`Classifier.task`. Another task is a class with the same methods.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from finetune.data.targets import ClassIndex, MultiHot
from finetune.features.average_precision import average_precision, mean_average_precision
from finetune.runs import best_epoch
from finetune.settings.schema import LabelKind
from finetune.training.calibration import Calibration
from finetune.training.loss import (
    Target,
    balanced_positive_weights,
    balanced_weights,
    loss_sum,
    target_of,
)
from finetune.training.threshold import Aim, parse_aim, parse_label_aim

# Shapes: B images, K classes.


@dataclass(frozen=True)
class _Task:
    """What both tasks have.

    Attributes:
        class_names: The classes or labels, in the order of the logits.
        label_smoothing: Share of the target in [0, 1) that is spread over all classes; of several labels evenly over
            present and absent.
        label_kind: The kind of labels, as in `ImageDataModule`.
        monitor: Name of the metric by which the best epoch is chosen. Higher is better.
    """

    class_names: tuple[str, ...]
    label_smoothing: float = 0.0
    label_kind: ClassVar[LabelKind]
    monitor: ClassVar[str]

    def standard_error(self, value: float, num_trials: float) -> float:
        """Return the standard error of a value of `monitor`, from the result of `num_trials`; 0 if that is 0."""
        return best_epoch.standard_error(value, num_trials)

    def target(self, batch: Mapping[str, Any]) -> Target:
        """Return the target of a batch."""
        return target_of(batch)

    def loss_sum(self, logits: Tensor, target: Target, class_weight: Tensor) -> Tensor:
        """Return the sum of the weighted losses of images. Divided by `target.weight(class_weight)` it is a mean.

        Args:
            logits: (B, K).
            target: The target of the same images.
            class_weight: The weight of each class, or of the positives of each label, (K,).
        """
        return loss_sum(logits, target, class_weight, self.label_smoothing)

    def uncalibrated(self) -> Calibration:
        """Return the calibration of a network that was not validated."""
        return Calibration.unfitted(self.label_kind, len(self.class_names))


@dataclass(frozen=True)
class SingleLabel(_Task):
    """Each image has exactly one class: cross entropy, softmax, accuracy."""

    label_kind: ClassVar[LabelKind] = "single"
    monitor: ClassVar[str] = best_epoch.MONITORS["single"]

    def num_trials(self, targets: ClassIndex) -> int:
        """Return the number of images, of which the monitored metric is a share."""
        return len(targets)

    def class_weights(self, targets: ClassIndex, weights: np.ndarray | None = None) -> Tensor:
        """Return weights (K,) by which all classes count the same, from the training targets.

        Args:
            targets: The targets of N images.
            weights: The weight of each image, (N,); None for 1 each.
        """
        counts = targets.counts() if weights is None else targets.weighted_counts(weights)
        return balanced_weights(counts)

    def score(self, logits: Tensor, labels: Tensor) -> float:
        """Return the monitored metric of images: the accuracy."""
        return float((logits.argmax(dim=1) == labels).double().mean())

    def calibration_metrics(self, calibration: Calibration) -> dict[str, float]:
        """Return what is logged of a calibration after a validation."""
        return {"val/temperature": calibration.temperature}

    def parse_aim(self, text: str) -> Aim:
        """Parse the value of `--threshold`."""
        return parse_aim(text, self.class_names)


@dataclass(frozen=True)
class MultiLabel(_Task):
    """Each image has several labels or none: binary cross entropy, a sigmoid for each label, mean average precision.

    The best epoch is chosen by the mean average precision `val/mAP`. It depends neither on thresholds nor on
    calibration, which are fitted after each validation, and it weighs rare labels as much as frequent ones.
    """

    label_kind: ClassVar[LabelKind] = "several"
    monitor: ClassVar[str] = best_epoch.MONITORS["several"]

    def num_trials(self, targets: MultiHot) -> float:
        """Return the effective number of images of the mean average precision.

        See `best_epoch.num_trials_of_labels`.
        """
        return best_epoch.num_trials_of_labels(targets.counts())

    def class_weights(self, targets: MultiHot, weights: np.ndarray | None = None) -> Tensor:
        """Return weights of positives (K,), by which they count as much as negatives, from the training targets.

        Args:
            targets: The targets of N images.
            weights: The weight of each image, (N,); None for 1 each.
        """
        if weights is None:
            return balanced_positive_weights(targets.counts(), len(targets))
        counts = targets.weighted_counts(weights / weights.mean())
        return balanced_positive_weights(counts, len(targets))

    def score(self, logits: Tensor, labels: Tensor) -> float:
        """Return the monitored metric of images: the mean average precision; 0 if none has a label."""
        of_labels = average_precision(logits.double().numpy(), labels.numpy())
        return float(np.nan_to_num(mean_average_precision(of_labels)))

    def calibration_metrics(self, calibration: Calibration) -> dict[str, float]:
        """Return what is logged of a calibration after a validation."""
        return {}

    def parse_aim(self, text: str) -> Aim:
        """Parse the value of `--threshold`."""
        return parse_label_aim(text)


Task = SingleLabel | MultiLabel


def task_for(
    label_kind: LabelKind, class_names: Sequence[str], label_smoothing: float = 0.0
) -> Any:
    """Return the task for a kind of labels. The type is `Any`, since targets differ between tasks."""
    if label_kind == "several":
        return MultiLabel(tuple(class_names), label_smoothing)
    return SingleLabel(tuple(class_names), label_smoothing)
