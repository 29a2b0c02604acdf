"""Metrics of a split. Their states are sums, so that every image counts once on any number of devices."""

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from finetune.training.calibration import Calibration
from finetune.training.precise_sums import PreciseSums, global_sums, restore_sums
from finetune.training.precision import double

_UNFITTED = Calibration()
# validation of class indices would make the CPU wait for the GPU
UNCHECKED: dict[str, Any] = {"validate_args": False}
_NUM_BINS = 15  # of the confidence, for the calibration error


class CalibrationError(PreciseSums):
    """Expected calibration error: the difference between confidence and accuracy, averaged over 15 confidence bins.

    torchmetrics' metric stores all predictions in lists. They grow with the data, and synchronization hangs if a rank
    has no predictions. Sums for each bin give the same number. As there, bins exclude their upper edge: [0, 1/15), …,
    [14/15, 1), and a bin for exactly 1.

    Source: Guo et al. 2017 (arXiv:1706.04599), section 2.
    """

    count: Tensor
    confidence: Tensor
    correct: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("count", "confidence", "correct"):
            empty = torch.zeros(_NUM_BINS + 1, dtype=torch.float64)
            self.add_state(name, empty, dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add predictions: probabilities (B, K) and class indices (B,)."""
        confidence, predicted = double(preds).max(dim=1)
        self.add(confidence, predicted == target.to(confidence.device))

    def add(self, confidence: Tensor, is_correct: Tensor) -> None:
        """Add predictions: the confidence of each and whether it is correct, (B,)."""
        edges = torch.linspace(0, 1, _NUM_BINS + 1, device=confidence.device)
        bins = torch.bucketize(confidence.float(), edges, right=True) - 1
        self.count.index_add_(0, bins, torch.ones_like(confidence))
        self.confidence.index_add_(0, bins, confidence)
        self.correct.index_add_(0, bins, is_correct.to(confidence.dtype))

    def compute(self) -> Tensor:
        return ((self.confidence - self.correct).abs().sum() / self.count.sum()).float()


class MeanLoss(PreciseSums):
    """A weighted mean. torchmetrics' MeanMetric ignores weights with nan_strategy="disable", its fast mode.

    Args:
        split: Name of the split, for the error message if no image could be decoded.
    """

    sum: Tensor
    weight: Tensor

    def __init__(self, split: str = "the split") -> None:
        super().__init__()
        self.split = split
        for name in ("sum", "weight"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, loss_sum: Tensor, weight: Tensor) -> None:
        """Add the sum of the weighted losses of images, and the sum of their weights."""
        self.sum += double(loss_sum.detach())
        self.weight += double(weight)

    def compute(self) -> Tensor:
        if self.weight == 0:
            raise ValueError(
                f"no image of {self.split} could be decoded: skipped.txt of this run has the reasons"
            )
        return (self.sum / self.weight).float()

    def total_weight(self) -> float:
        """Return the sum of all weights over all ranks. Every rank must call this at the same point."""
        return float(global_sums(self)["weight"])


def split_metrics(num_classes: int) -> MetricCollection:
    """Return the metrics of predicted classes on an evaluation split. They take predicted and true indices (B,)."""
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(num_classes, average="micro", **UNCHECKED),
            "confusion_matrix": MulticlassConfusionMatrix(num_classes, **UNCHECKED),
        }
    )


def class_metrics(confusion: Tensor) -> dict[str, Tensor]:
    """Return precision and recall of each class (K,), and the macro F1, from a confusion matrix (K, K).

    The recall of a class without images is NaN. So is the precision of a class that is never predicted. torchmetrics
    reports 0 for both. The macro F1 is the mean over the classes with images.
    """
    right = confusion.diag().float()
    actual = confusion.sum(dim=1)
    predicted = confusion.sum(dim=0)
    f1 = 2 * right / (actual + predicted)
    return {"precision": right / predicted, "recall": right / actual, "f1": f1[actual > 0].mean()}


class SummedMetrics(nn.Module):
    """Metrics of the training images of an epoch. Their states are sums, which a checkpoint saves."""

    def sums(self) -> dict[str, dict[str, Tensor]]:
        """Return the states of each metric, summed over all ranks."""
        return {name: global_sums(metric) for name, metric in self.named_children()}  # type: ignore[arg-type]

    def restore(self, sums: dict[str, dict[str, Tensor]], is_rank_zero: bool) -> None:
        """Restore the result of `sums` on rank 0. The other ranks start at zero, so that the total is the same."""
        for name, state in sums.items():
            restore_sums(getattr(self, name), state, is_rank_zero)


class TrainMetrics(SummedMetrics):
    """Loss and accuracy during training. Checkpoints save the sums of the current epoch."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.train_loss = MeanLoss("train")
        self.train_accuracy = MulticlassAccuracy(num_classes, average="micro")

    def update(self, logits: Tensor, labels: Tensor, loss_sum: Tensor, weight: Tensor) -> None:
        """Add a batch: logits (B, K), class indices (B,), the sum of its weighted losses and that of its weights."""
        self.train_loss.update(loss_sum, weight)
        self.train_accuracy.update(logits.detach(), labels)

    def take(self) -> dict[str, Tensor]:
        """Return the metrics by name over all ranks, and reset."""
        values = {
            "train/loss_epoch": self.train_loss.compute(),
            "train/accuracy": self.train_accuracy.compute(),
        }
        for metric in (self.train_loss, self.train_accuracy):
            metric.reset()
        return values


class SplitMetrics(nn.Module):
    """All metrics of one evaluation split.

    The loss is that of the uncalibrated logits. With a calibration, predicted classes and `calibration_error` are those
    of `predict`, and `calibration_error_before_scaling` is that of the uncalibrated probabilities.
    """

    def __init__(self, num_classes: int, split: str) -> None:
        super().__init__()
        self.loss = MeanLoss(split)
        self.metrics = split_metrics(num_classes)
        self.calibration_error = CalibrationError()
        self.before_scaling = CalibrationError()

    def update(
        self,
        logits: Tensor,
        labels: Tensor,
        loss_sum: Tensor,
        weight: Tensor,
        calibration: Calibration = _UNFITTED,
    ) -> None:
        """Add a batch: logits (B, K), class indices (B,), the sum of its weighted losses and that of its weights."""
        self.loss.update(loss_sum, weight)
        uncalibrated = logits.float().softmax(dim=1)
        scaled = uncalibrated
        if calibration.num_images:
            scaled = calibration.probabilities(logits)
            self.before_scaling.update(uncalibrated, labels)
        self.calibration_error.update(scaled, labels)
        self.metrics.update(calibration.decide(scaled).to(labels.device), labels)

    def take(
        self, class_names: list[str], calibration: Calibration = _UNFITTED
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the metrics by name over all ranks, and the sums behind them; and reset.

        The sums are `confusion_matrix` (rows: true classes) and `loss_weight`, the sum of the weights of the images in
        the loss.
        """
        values = {"loss": self.loss.compute(), **self.metrics.compute()}
        loss_weight = self.loss.total_weight()
        values |= class_metrics(values["confusion_matrix"])
        values["calibration_error"] = self.calibration_error.compute()
        if calibration.num_images:
            values["calibration_error_before_scaling"] = self.before_scaling.compute()
        for metric in (self.loss, self.metrics, self.calibration_error, self.before_scaling):
            metric.reset()
        confusion = values.pop("confusion_matrix").tolist()
        for name in ("precision", "recall"):
            per_class = values.pop(name)
            values |= {
                f"{name}/{c}": value for c, value in zip(class_names, per_class, strict=True)
            }
        floats = {name: value.float() for name, value in values.items()}
        return floats, {"confusion_matrix": confusion, "loss_weight": loss_weight}


def reset_metrics(module: nn.Module) -> None:
    """Reset all metrics of a module. An earlier fit of the same module may have been interrupted."""
    for metric in module.modules():
        if isinstance(metric, Metric):
            metric.reset()
