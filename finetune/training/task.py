"""The classification task: what labels mean, and the loss, metrics and decisions that follow from it.

There are two tasks: each image has exactly one class (`SingleLabel`), or several labels or none (`MultiLabel`). The
training step, the evaluation and the callbacks of a run use only the methods that both have, through
`Classifier.task`. Another task is a class with the same methods.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from finetune.data.targets import ClassIndex, MultiHot
from finetune.models import ensemble
from finetune.models.heads import LabelKind
from finetune.runs import best_epoch
from finetune.training.calibration import Calibration, Calibrator, fit_calibration
from finetune.training.initial_weights import balanced_weights
from finetune.training.logit_histogram import (
    average_precision,
    histogram,
    mean_average_precision,
)
from finetune.training.loss import Target, check_smoothing, loss_sum, target_of
from finetune.training.metrics import SplitMetrics, TrainMetrics
from finetune.training.multilabel_calibration import (
    MultilabelCalibration,
    MultilabelCalibrator,
    fit_multilabel_calibration,
)
from finetune.training.multilabel_loss import (
    MultilabelTarget,
    balanced_positive_weights,
    multilabel_loss_sum,
    multilabel_losses,
    multilabel_target,
)
from finetune.training.multilabel_metrics import MultilabelSplitMetrics, MultilabelTrainMetrics
from finetune.training.threshold import Aim, LabelAim, parse_aim, parse_label_aim

# Shapes: B images, M members of an ensemble, K classes.


@dataclass(frozen=True)
class SingleLabel:
    """Each image has exactly one class: cross entropy, softmax, accuracy.

    Attributes:
        class_names: The classes, in the order of the logits.
        label_smoothing: Share of the target spread over all classes, in [0, 1).
        label_kind: The kind of labels, as in `ImageDataModule`.
        monitor: Name of the metric by which the best epoch is chosen. Higher is better.
    """

    class_names: tuple[str, ...]
    label_smoothing: float = 0.0
    label_kind: ClassVar[LabelKind] = "single"
    monitor: ClassVar[str] = best_epoch.MONITORS["single"]

    def num_trials(self, targets: ClassIndex) -> int:
        """Return the number of images, of which the monitored metric is a share."""
        return len(targets)

    def standard_error(self, value: float, num_trials: float) -> float:
        """Return the standard error of a value of `monitor`, from the result of `num_trials`; 0 if that is 0."""
        return best_epoch.standard_error(value, num_trials)

    def target(self, batch: Mapping[str, Any]) -> Target:
        """Return the target of a batch."""
        return target_of(batch)

    def loss_sum(self, logits: Tensor, target: Target, class_weight: Tensor) -> Tensor:
        """Return the sum of the weighted losses of images. Divided by `target.weight(class_weight)` it is a mean.

        The weight of an image is its own weight times that of its class.

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

    def class_weights(self, targets: ClassIndex, weights: np.ndarray | None = None) -> Tensor:
        """Return weights (K,) by which all classes count the same, from the training targets.

        Args:
            targets: The targets of N images.
            weights: The weight of each image, (N,); None for 1 each.
        """
        counts = targets.counts() if weights is None else targets.weighted_counts(weights)
        return balanced_weights(counts)

    def combined(self, logits: Tensor) -> Tensor:
        """Return the logits (B, K) of an ensemble from those of its members (M, B, K); others unchanged."""
        return ensemble.combine_logits(logits)

    def probabilities(self, logits: Tensor, calibration: Calibration) -> Tensor:
        """Return the probability of each class (B, K) in float64."""
        return calibration.probabilities(logits)

    def decide(self, probabilities: Tensor, calibration: Calibration) -> Tensor:
        """Return the index of the predicted class of each image (B,)."""
        return calibration.decide(probabilities)

    def score(self, logits: Tensor, labels: Tensor) -> float:
        """Return the monitored metric of images of this process: the accuracy."""
        return float((logits.argmax(dim=1) == labels).double().mean())

    def train_metrics(self) -> TrainMetrics:
        return TrainMetrics(len(self.class_names))

    def split_metrics(self, split: str) -> SplitMetrics:
        return SplitMetrics(len(self.class_names), split)

    def calibrator(self) -> Calibrator:
        return Calibrator()

    def uncalibrated(self) -> Calibration:
        """Return the calibration of a network that was not validated."""
        return Calibration()

    def fit_calibration(self, logits: Tensor, labels: Tensor, aim: Aim | None) -> Calibration:
        """Return the calibration for images of this process; see `calibration.fit_calibration`."""
        return fit_calibration(logits, labels, aim)

    def calibration_metrics(self, calibration: Calibration) -> dict[str, float]:
        """Return what is logged of a calibration after a validation."""
        return {"val/temperature": calibration.temperature}

    def parse_aim(self, text: str) -> Aim:
        """Parse the value of `--threshold`."""
        return parse_aim(text, self.class_names)


@dataclass(frozen=True)
class MultiLabel:
    """Each image has several labels or none: binary cross entropy, a sigmoid for each label, mean average precision.

    The best epoch is chosen by the mean average precision `val/mAP`. It depends neither on thresholds nor on
    calibration, which are fitted after each validation, and it weighs rare labels as much as frequent ones.

    Attributes:
        class_names: The labels, in the order of the logits.
        label_smoothing: Share of each target spread evenly over present and absent, in [0, 1).
        label_kind: The kind of labels, as in `ImageDataModule`.
        monitor: Name of the metric by which the best epoch is chosen. Higher is better.
    """

    class_names: tuple[str, ...]
    label_smoothing: float = 0.0
    label_kind: ClassVar[LabelKind] = "several"
    monitor: ClassVar[str] = best_epoch.MONITORS["several"]

    def num_trials(self, targets: MultiHot) -> float:
        """Return the effective number of images of the mean average precision.

        See `best_epoch.num_trials_of_labels`.
        """
        return best_epoch.num_trials_of_labels(targets.counts())

    def standard_error(self, value: float, num_trials: float) -> float:
        """Return the standard error of a value of `monitor`, from the result of `num_trials`; 0 if that is 0."""
        return best_epoch.standard_error(value, num_trials)

    def target(self, batch: Mapping[str, Any]) -> MultilabelTarget:
        """Return the target of a batch."""
        return multilabel_target(batch)

    def loss_sum(self, logits: Tensor, target: MultilabelTarget, class_weight: Tensor) -> Tensor:
        """Return the sum of the weighted losses of images. Divided by `target.weight(class_weight)` it is a mean.

        Args:
            logits: (B, K); for the members of an ensemble (M, B, K). The result is then the mean over members.
            target: The target of the same images.
            class_weight: The weight of the positive labels of each class, (K,).
        """
        return multilabel_loss_sum(logits, target, class_weight, self.label_smoothing)

    def losses(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each image (B,), without weights and smoothing, from probabilities and labels (B, K)."""
        return multilabel_losses(probabilities, labels)

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

    def combined(self, logits: Tensor) -> Tensor:
        """Return the logits (B, K) of an ensemble from those of its members (M, B, K); others unchanged."""
        return ensemble.combine_logits(logits, "several")

    def probabilities(self, logits: Tensor, calibration: MultilabelCalibration) -> Tensor:
        """Return the probability of each label (B, K) in float64."""
        return calibration.probabilities(logits)

    def decide(self, probabilities: Tensor, calibration: MultilabelCalibration) -> Tensor:
        """Return for each image which labels are predicted, (B, K) bool."""
        return calibration.decide(probabilities)

    def score(self, logits: Tensor, labels: Tensor) -> float:
        """Return the monitored metric of images of this process: the mean average precision; 0 if none has a label."""
        of_labels = average_precision(histogram(logits, labels))
        return float(mean_average_precision(of_labels).nan_to_num(0.0))

    def train_metrics(self) -> MultilabelTrainMetrics:
        return MultilabelTrainMetrics(len(self.class_names))

    def split_metrics(self, split: str) -> MultilabelSplitMetrics:
        return MultilabelSplitMetrics(len(self.class_names), split)

    def calibrator(self) -> MultilabelCalibrator:
        return MultilabelCalibrator(len(self.class_names))

    def uncalibrated(self) -> MultilabelCalibration:
        """Return the calibration of a network that was not validated."""
        return MultilabelCalibration.unfitted(len(self.class_names))

    def fit_calibration(
        self, logits: Tensor, labels: Tensor, aim: LabelAim | None
    ) -> MultilabelCalibration:
        """Return the calibration for images of this process."""
        return fit_multilabel_calibration(logits, labels, aim)

    def calibration_metrics(self, calibration: MultilabelCalibration) -> dict[str, float]:
        """Return what is logged of a calibration after a validation."""
        return {}

    def parse_aim(self, text: str) -> LabelAim:
        """Parse the value of `--threshold`."""
        return parse_label_aim(text)


Task = SingleLabel | MultiLabel


def task_for(
    label_kind: LabelKind, class_names: Sequence[str], label_smoothing: float = 0.0
) -> Any:
    """Return the task for a kind of labels. The type is `Any`, since targets and calibrations differ between tasks.

    Raises:
        WrongUsage: A setting is out of range.
    """
    check_smoothing(label_smoothing)
    if label_kind == "several":
        return MultiLabel(tuple(class_names), label_smoothing)
    return SingleLabel(tuple(class_names), label_smoothing)
