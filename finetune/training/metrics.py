"""What is measured on a split: metrics with sum states only, so that every picture counts once on any devices."""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)

from finetune.training.precision import WITHOUT_FLOAT64, double


class PreciseSums(Metric):
    """A metric of sums in float64. Where the model's device has no such, as Apple's, they stay on the CPU."""

    full_state_update = False

    def _apply(self, fn: Callable, exclude_state: Sequence[str] = "") -> nn.Module:
        @functools.wraps(fn)  # torchmetrics goes by the name
        def moved(state: Tensor) -> Tensor:
            is_kept = state.dtype == torch.float64 and fn(torch.zeros(1)).device.type in WITHOUT_FLOAT64
            return state.cpu() if is_kept else fn(state)

        return super()._apply(moved, exclude_state)


class CalibrationError(PreciseSums):
    """Expected calibration error: how far confidence and accuracy lie apart, averaged over 15 bins of confidence.

    torchmetrics' own keeps every prediction in lists, which grow with the data and hang where a device has none; sums
    for each bin give the same number. Bins are open to the right, as there: [0, 1/15), …, [14/15, 1), and 1 by itself.

    Source: Guo et al. 2017 (arXiv:1706.04599), section 2.
    """

    count: Tensor
    confidence: Tensor
    correct: Tensor

    def __init__(self, num_bins: int = 15) -> None:
        super().__init__()
        self.num_bins = num_bins
        for name in ("count", "confidence", "correct"):
            self.add_state(name, torch.zeros(num_bins + 1, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add predictions: probabilities (B, K) and class indices (B,)."""
        confidence, predicted = double(preds).max(dim=1)
        target = target.to(confidence.device)
        edges = torch.linspace(0, 1, self.num_bins + 1, device=confidence.device)
        bins = torch.bucketize(confidence.float(), edges, right=True) - 1
        self.count.index_add_(0, bins, torch.ones_like(confidence))
        self.confidence.index_add_(0, bins, confidence)
        self.correct.index_add_(0, bins, (predicted == target).to(confidence.dtype))

    def compute(self) -> Tensor:
        return ((self.confidence - self.correct).abs().sum() / self.count.sum()).float()


class MeanLoss(PreciseSums):
    """A mean by weights; torchmetrics' MeanMetric drops the weights with nan_strategy="disable", the cheap one.

    Args:
        split: Whose pictures these are, for the error where none could be decoded.
    """

    sum: Tensor
    weight: Tensor

    def __init__(self, split: str = "the split") -> None:
        super().__init__()
        self.split = split
        for name in ("sum", "weight"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, loss_sum: Tensor, weight: Tensor) -> None:
        """Add the sum of the weighted losses of some pictures and the sum of their weights."""
        self.sum += double(loss_sum.detach())
        self.weight += double(weight)

    def compute(self) -> Tensor:
        if self.weight == 0:
            raise ValueError(f"no picture of {self.split} could be decoded: skipped.txt of this run says why")
        return (self.sum / self.weight).float()


def balanced_weights(labels: np.ndarray, num_classes: int) -> Tensor:
    """Return a weight for each class (num_classes,), inverse to its frequency in labels (N,), 1 on their average."""
    counts = torch.bincount(torch.from_numpy(labels), minlength=num_classes)
    return counts.sum() / (num_classes * counts.clamp_min(1))


def split_metrics(num_classes: int) -> MetricCollection:
    """Return the metrics of one evaluation split, fed with probabilities (B, K) and class indices (B,)."""
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(num_classes, average="micro"),
            "f1": MulticlassF1Score(num_classes, average="macro"),
            "precision": MulticlassPrecision(num_classes, average=None),
            "recall": MulticlassRecall(num_classes, average=None),
            "confusion_matrix": MulticlassConfusionMatrix(num_classes),
            "calibration_error": CalibrationError(),
        }
    )


class SplitMetrics(nn.Module):
    """All that is measured on one evaluation split."""

    def __init__(self, num_classes: int, split: str) -> None:
        super().__init__()
        self.loss, self.metrics = MeanLoss(split), split_metrics(num_classes)

    def update(self, logits: Tensor, labels: Tensor, loss_sum: Tensor, weight: Tensor) -> None:
        """Add a batch: logits (B, K), class indices (B,), the sum of its weighted losses and that of its weights."""
        self.loss.update(loss_sum, weight)
        self.metrics.update(logits.float().softmax(dim=1), labels)

    def take(self, class_names: list[str]) -> tuple[dict[str, Tensor], list[list[int]]]:
        """Return numbers by name and the confusion matrix (rows: the true class), over all devices, and start again."""
        values = {"loss": self.loss.compute(), **self.metrics.compute()}
        self.loss.reset()
        self.metrics.reset()
        confusion = values.pop("confusion_matrix").tolist()
        for name in ("precision", "recall"):
            per_class = values.pop(name)
            values |= {f"{name}/{c}": value for c, value in zip(class_names, per_class, strict=True)}
        return {name: value.float() for name, value in values.items()}, confusion


def global_sums(metric: Metric) -> dict[str, Tensor]:
    """Return the states of a metric over all devices; every device calls this at the same point."""
    with metric.sync_context():
        return {name: getattr(metric, name).detach().cpu().clone() for name in metric._defaults}


def restore_sums(metric: Metric, sums: dict[str, Tensor], is_first: bool) -> None:
    """Go on from `global_sums`: one device takes all of them, the others start at zero."""
    metric.reset()
    if is_first:
        for name, value in sums.items():
            setattr(metric, name, value.to(getattr(metric, name).device))
        metric._update_count = 1
