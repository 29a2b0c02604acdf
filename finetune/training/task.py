"""What the labels of images mean: the loss, the metrics and the decisions that follow from it.

There is one kind: an image is of exactly one class. Another kind is a class with the methods of `SingleLabel`, which
`Classifier.task` then holds; the training step, the evaluation and the callbacks of a run ask nothing else.
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
    """Each image is of exactly one class: cross entropy, softmax, accuracy.

    Attributes:
        class_names: The classes, in the order of the logits.
        label_smoothing: Share of the target spread over all classes, in [0, 1).
        monitor: Name of the metric, the higher the better, by which the best epoch is chosen.
    """

    class_names: tuple[str, ...]
    label_smoothing: float = 0.0
    monitor: ClassVar[str] = best_epoch.MONITOR

    def standard_error(self, value: float, num_images: int) -> float:
        """Return the standard error of the monitored metric on so many images; 0 for an unknown number of images."""
        return best_epoch.standard_error(value, num_images)

    def target(self, batch: Mapping[str, Any]) -> Target:
        """Return what the images of a batch should be predicted as."""
        return target_of(batch)

    def loss_sum(self, logits: Tensor, target: Target, class_weight: Tensor) -> Tensor:
        """Return the sum of the losses of images: a mean, if divided by `target.weight(class_weight)`.

        Args:
            logits: (B, K); of members (M, B, K), whose mean is returned.
            target: Of the same images.
            class_weight: The weight of each class, (K,).
        """
        return loss_sum(logits, target, class_weight, self.label_smoothing)

    def losses(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each image (B,) without weights and smoothing, from probabilities (B, K) in float64."""
        log_probabilities = probabilities.clamp_min(torch.finfo(torch.float64).tiny).log()
        return -log_probabilities.gather(1, labels[:, None]).squeeze(1)

    def class_weights(self, num_images: np.ndarray) -> Tensor:
        """Return the weight of each class (K,) that makes all count the same, from their numbers of images (K,)."""
        return balanced_weights(num_images)

    def combined(self, logits: Tensor) -> Tensor:
        """Return the logits (B, K) of an ensemble from those of its members (M, B, K); others as they are."""
        return ensemble.together(logits)

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
        """Return the calibration for images that one process has; see `calibration.fit_calibration`."""
        return fit_calibration(logits, labels, aim)
