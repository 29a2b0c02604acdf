"""Metrics for several labels an image. Their states are sums, so that every image counts once on any number of devices.

The names are those of torchmetrics: average precision, its mean `mAP`, F1 (macro and micro), exact match and Hamming
distance.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import (
    MultilabelConfusionMatrix,
    MultilabelExactMatch,
    MultilabelF1Score,
)

from finetune.training.logit_histogram import (
    LogitHistogram,
    average_precision,
    mean_average_precision,
)
from finetune.training.metrics import UNCHECKED, CalibrationError, MeanLoss, SummedMetrics
from finetune.training.multilabel_calibration import (
    MultilabelCalibration,
    label_calibration_errors,
)
from finetune.training.precision import double

# Shapes: B images, K labels.


class LabelCalibrationError(CalibrationError):
    """The calibration error of all pairs of an image and a label, between probability and share of the labels."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add images: probabilities and labels (B, K)."""
        probabilities = double(preds).flatten()
        self.add(probabilities, target.to(probabilities.device).flatten())


class Cooccurrence(Metric):
    """Counts the images that have two labels at once."""

    full_state_update = False
    counts: Tensor

    def __init__(self, num_labels: int) -> None:
        super().__init__()
        empty = torch.zeros(num_labels, num_labels, dtype=torch.int64)
        self.add_state("counts", empty, dist_reduce_fx="sum")

    def update(self, target: Tensor) -> None:
        """Add images: labels, (B, K), 0 or 1."""
        # in float64, since GPUs multiply no matrices of integers; counts are exact up to 2 ** 53
        labels = double(target)
        self.counts += (labels.T @ labels).long().to(self.counts.device)

    def compute(self) -> Tensor:
        """Return the number of images with both labels, (K, K)."""
        return self.counts


def label_metrics(confusion: Tensor) -> dict[str, Tensor]:
    """Return precision, recall and F1 of each label (K,), and F1 and the Hamming distance of all labels.

    The recall of a label without images is NaN. So is the precision of a label that is never predicted. The macro F1
    is the mean over the labels with images. The micro F1 is that of all pairs of an image and a label.

    Args:
        confusion: True negatives, false positives, false negatives and true positives, (K, 2, 2).
    """
    counts = confusion.double()
    false_positives = counts[:, 0, 1]
    false_negatives = counts[:, 1, 0]
    hits = counts[:, 1, 1]
    errors = false_positives + false_negatives
    f1 = 2 * hits / (2 * hits + errors)
    has_images = hits + false_negatives > 0
    return {
        "precision": hits / (hits + false_positives),
        "recall": hits / (hits + false_negatives),
        "f1_macro": f1[has_images].mean(),
        "f1_micro": 2 * hits.sum() / (2 * hits + errors).sum(),
        "hamming_distance": errors.sum() / counts.sum(),
    }


class MultilabelTrainMetrics(SummedMetrics):
    """Loss and micro F1 during training. Checkpoints save the sums of the current epoch.

    The F1 is that of the decisions at a probability of 1/2. For mixed images the labels are those of the larger part.
    """

    def __init__(self, num_labels: int) -> None:
        super().__init__()
        self.train_loss = MeanLoss("train")
        self.train_f1 = MultilabelF1Score(num_labels, average="micro", **UNCHECKED)

    def update(self, logits: Tensor, labels: Tensor, loss_sum: Tensor, weight: Tensor) -> None:
        """Add a batch: logits and labels (B, K), the sum of its losses and its number of images."""
        self.train_loss.update(loss_sum, weight)
        # whole numbers, since torchmetrics guesses whether floats are logits or probabilities
        self.train_f1.update((logits.detach() > 0).long(), labels.long())

    def take(self) -> dict[str, Tensor]:
        """Return the metrics by name over all ranks, and reset."""
        values = {
            "train/loss_epoch": self.train_loss.compute(),
            "train/f1_micro": self.train_f1.compute(),
        }
        for metric in (self.train_loss, self.train_f1):
            metric.reset()
        return values


class MultilabelSplitMetrics(nn.Module):
    """All metrics of one evaluation split.

    The loss and the average precisions are those of the uncalibrated logits. With a calibration, decisions and
    `calibration_error` are those of `predict`; without one, decisions are taken at a probability of 1/2.
    """

    def __init__(self, num_labels: int, split: str) -> None:
        super().__init__()
        self.loss = MeanLoss(split)
        self.histogram = LogitHistogram(num_labels)
        self.confusion = MultilabelConfusionMatrix(num_labels, **UNCHECKED)
        self.exact_match = MultilabelExactMatch(num_labels, **UNCHECKED)
        self.cooccurrence = Cooccurrence(num_labels)
        self.calibration_error = LabelCalibrationError()
        self.before_scaling = LabelCalibrationError()

    def update(
        self,
        logits: Tensor,
        labels: Tensor,
        loss_sum: Tensor,
        weight: Tensor,
        calibration: MultilabelCalibration,
    ) -> None:
        """Add a batch: logits and labels (B, K), the sum of its losses and its number of images."""
        self.loss.update(loss_sum, weight)
        self.histogram.update(logits, labels)
        probabilities = calibration.probabilities(logits)
        decisions = calibration.decide(probabilities).long().to(labels.device)
        labels = labels.long()
        self.confusion.update(decisions, labels)
        self.exact_match.update(decisions, labels)
        self.cooccurrence.update(labels)
        self.calibration_error.update(probabilities, labels)
        if calibration.num_images:
            self.before_scaling.update(double(logits).sigmoid(), labels)

    def take(
        self, class_names: list[str], calibration: MultilabelCalibration
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the metrics by name over all ranks, and the sums behind them; and reset.

        `label_counts` (K, 2, 2) has for each label the true negatives, false positives, false negatives and true
        positives. `cooccurrence` (K, K) has the images with two labels. `label_calibration` has the calibration errors
        of the labels; see `label_calibration_errors`. `loss_weight` is the sum of the weights of the images in the
        loss.
        """
        confusion = self.confusion.compute()
        cooccurrence = self.cooccurrence.compute()
        loss_weight = self.loss.total_weight()
        histogram = self.histogram.compute()
        of_labels = average_precision(histogram)
        values = {
            "loss": self.loss.compute(),
            "mAP": mean_average_precision(of_labels),
            "exact_match": self.exact_match.compute(),
            **label_metrics(confusion),
            "average_precision": of_labels,
            "calibration_error": self.calibration_error.compute(),
        }
        if calibration.num_images:
            values["calibration_error_before_scaling"] = self.before_scaling.compute()
        for metric in self.children():
            metric.reset()  # type: ignore[operator]
        for name in ("precision", "recall", "average_precision"):
            per_label = values.pop(name)
            values |= {
                f"{name}/{c}": value for c, value in zip(class_names, per_label, strict=True)
            }
        tables = {
            "label_counts": confusion.tolist(),
            "cooccurrence": cooccurrence.tolist(),
            "label_calibration": label_calibration_errors(histogram, calibration),
            "loss_weight": loss_weight,
        }
        return {name: value.float() for name, value in values.items()}, tables
