"""The classification task: what labels mean, and the loss, metrics and decisions that follow from it.

There is one task: each image has exactly one class. Another task is a class with the methods of `SingleLabel` as
`Classifier.task`. The training step, the evaluation and the callbacks of a run use only these methods.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from finetune.models import ensemble
from finetune.runs import best_epoch
from finetune.training.calibration import Calibration, Calibrator, fit_calibration
from finetune.training.initial_weights import balanced_weights
from finetune.training.loss import Target, loss_sum, target_of
from finetune.training.metrics import SplitMetrics, TrainMetrics
from finetune.training.threshold import Aim

# Shapes: B images, M members of an ensemble, K classes.


@dataclass(frozen=True)
class SingleLabel:
    """Each image has exactly one class: cross entropy, softmax, accuracy.

    Attributes:
        class_names: The classes, in the order of the logits.
        label_smoothing: Share of the target spread over all classes, in [0, 1).
        monitor: Name of the metric by which the best epoch is chosen. Higher is better.
    """

    class_names: tuple[str, ...]
    label_smoothing: float = 0.0
    monitor: ClassVar[str] = best_epoch.MONITOR

    def standard_error(self, value: float, num_images: int) -> float:
        """Return the standard error of a value of `monitor` on `num_images` images; 0 if their number is unknown."""
        return best_epoch.standard_error(value, num_images)

    def target(self, batch: Mapping[str, Any]) -> Target:
        """Return the target of a batch."""
        return target_of(batch)

    def loss_sum(self, logits: Tensor, target: Target, class_weight: Tensor) -> Tensor:
        """Return the sum of the weighted losses of images. Divided by `target.weight(class_weight)` it is a mean.

        Args:
            logits: (B, K); for the members of an ensemble (M, B, K). The result is then the mean over members.
            target: The target of the same images.
            class_weight: The weight of each class, (K,).
        """
        return loss_sum(logits, target, class_weight, self.label_smoothing)

    def losses(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each image (B,), without class weights and smoothing, from probabilities (B, K)."""
        log_probabilities = probabilities.clamp_min(torch.finfo(torch.float64).tiny).log()
        return -log_probabilities.gather(1, labels[:, None]).squeeze(1)

    def class_weights(self, num_images: np.ndarray) -> Tensor:
        """Return weights (K,) by which all classes count the same, from their numbers of images (K,)."""
        return balanced_weights(num_images)

    def combined(self, logits: Tensor) -> Tensor:
        """Return the logits (B, K) of an ensemble from those of its members (M, B, K); others unchanged."""
        return ensemble.combine_logits(logits)

    def probabilities(self, logits: Tensor, calibration: Calibration) -> Tensor:
        """Return the probability of each class (B, K) in float64."""
        return calibration.probabilities(logits)

    def decide(self, probabilities: Tensor, calibration: Calibration) -> Tensor:
        """Return the index of the predicted class of each image (B,)."""
        return calibration.decide(probabilities)

    def is_right(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return for each image (B,) whether its most probable class is its label."""
        return logits.argmax(dim=1) == labels

    def train_metrics(self) -> TrainMetrics:
        return TrainMetrics(len(self.class_names))

    def split_metrics(self, split: str) -> SplitMetrics:
        return SplitMetrics(len(self.class_names), split)

    def calibrator(self) -> Calibrator:
        return Calibrator()

    def fit_calibration(self, logits: Tensor, labels: Tensor, aim: Aim | None) -> Calibration:
        """Return the calibration for images of this process; see `calibration.fit_calibration`."""
        return fit_calibration(logits, labels, aim)
