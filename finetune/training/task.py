"""The classification task: what labels mean, and the loss, metric and decisions that follow from it.

Each image has exactly one class: cross entropy, softmax, accuracy. Or it has several labels or none: binary cross
entropy, a sigmoid for each label, mean average precision. The training step, the evaluation and the callbacks of a run
ask `Classifier.task`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from finetune.features.average_precision import average_precision, mean_average_precision
from finetune.runs.best_epoch import MONITORS, num_trials_of_labels
from finetune.settings.schema import LabelKind
from finetune.training.calibration import Calibration
from finetune.training.loss import Target, balanced_positive_weights, balanced_weights, loss_sum
from finetune.training.threshold import Aim, parse_aim

# Shapes: B images, K classes.


@dataclass(frozen=True)
class Task:
    """The task for a kind of labels.

    Attributes:
        label_kind: The kind of labels, as in `ImageDataModule`.
        class_names: The classes or labels, in the order of the logits.
        label_smoothing: Share of the target in [0, 1) that is spread over all classes; of several labels evenly over
            present and absent.
    """

    label_kind: LabelKind
    class_names: Sequence[str]
    label_smoothing: float = 0.0

    @property
    def monitor(self) -> str:
        """Name of the metric by which the best epoch is chosen. Higher is better.

        The mean average precision depends neither on thresholds nor on calibration, which are fitted after each
        validation, and it weighs rare labels as much as frequent ones.
        """
        return MONITORS[self.label_kind]

    def loss_sum(self, logits: Tensor, target: Target, class_weight: Tensor) -> Tensor:
        """Return the sum of the weighted losses of images. Divided by `target.weight(class_weight)` it is a mean.

        Args:
            logits: (B, K).
            target: The target of the same images.
            class_weight: The weight of each class, or of the positives of each label, (K,).
        """
        return loss_sum(logits, target, class_weight, self.label_smoothing)

    def class_weights(self, targets: Any, weights: np.ndarray | None = None) -> Tensor:
        """Return weights (K,) by which all classes, or positives and negatives of each label, count the same.

        Args:
            targets: The targets of the N training images.
            weights: The weight of each image, (N,); None for 1 each.
        """
        if self.label_kind == "single":
            counts = targets.counts() if weights is None else targets.weighted_counts(weights)
            return balanced_weights(counts)
        if weights is None:
            return balanced_positive_weights(targets.counts(), len(targets))
        return balanced_positive_weights(
            targets.weighted_counts(weights / weights.mean()), len(targets)
        )

    def num_trials(self, targets: Any) -> float:
        """Return the number of images of which `monitor` is a share; of several labels the effective number."""
        if self.label_kind == "single":
            return len(targets)
        return num_trials_of_labels(targets.counts())

    def score(self, logits: Tensor, labels: Tensor) -> float:
        """Return the value of `monitor`: the accuracy, or the mean average precision, which is 0 without any label."""
        if self.label_kind == "single":
            return float((logits.argmax(dim=1) == labels).double().mean())
        of_labels = average_precision(logits.double().numpy(), labels.numpy())
        return float(np.nan_to_num(mean_average_precision(of_labels)))

    def uncalibrated(self) -> Calibration:
        """Return the calibration of a network that was not validated."""
        return Calibration.unfitted(self.label_kind, len(self.class_names))

    def parse_aim(self, text: str) -> Aim:
        """Parse the value of `--threshold`."""
        return parse_aim(text, self.class_names, self.label_kind)
