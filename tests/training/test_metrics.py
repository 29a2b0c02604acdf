"""Metrics, compared with torchmetrics and sums by hand, complete and merged from uneven parts."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from metric_parts import put_together
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import MeanMetric
from torchmetrics.classification import (
    MulticlassCalibrationError,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)

from finetune.training.classifier import Classifier
from finetune.training.metrics import CalibrationError, MeanLoss, class_metrics, split_metrics
from finetune.training.precise_sums import global_sums, restore_sums

# float32 results of sums of 1,000 terms below 1: a few units of 1e-7.
TOLERANCE = 1e-6


def predictions(
    num: int = 1000, num_classes: int = 4, sharpness: float = 2.0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = sharpness * torch.randn(num, num_classes, generator=generator)
    random = torch.randint(num_classes, (num,), generator=generator)
    labels = torch.where(torch.rand(num, generator=generator) < 0.6, logits.argmax(1), random)
    return logits.softmax(dim=1), labels


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("num", [1, 2, 1000])
def test_calibration_error_equals_torchmetrics(num, sharpness):
    preds, labels = predictions(num, sharpness=sharpness)
    reference = MulticlassCalibrationError(4, n_bins=15, norm="l1")(preds, labels)
    metric = CalibrationError()
    metric.update(preds, labels)
    assert metric.compute().item() == pytest.approx(reference.item(), abs=TOLERANCE)


def on_edges() -> tuple[torch.Tensor, torch.Tensor]:
    """Confidences k/15 and their nearest float neighbours, 1 included; every second prediction is wrong."""
    edges = torch.linspace(0, 1, 16)[8:]  # of two classes one has at least half
    below, above = (
        torch.nextafter(edges, torch.zeros(1)),
        torch.nextafter(edges[:-1], torch.ones(1)),
    )
    confidence = torch.cat([edges, edges, below, above])
    labels = torch.arange(len(confidence)) % 2
    return torch.stack([confidence, 1 - confidence], dim=1), labels


def test_calibration_error_on_the_edges_of_the_bins():
    preds, labels = on_edges()
    reference = MulticlassCalibrationError(2, n_bins=15, norm="l1")
    for num in range(1, len(labels) + 1):  # every prefix: differences must not cancel
        metric = CalibrationError()
        metric.update(preds[:num], labels[:num])
        assert metric.compute().item() == pytest.approx(
            reference(preds[:num], labels[:num]).item(), abs=TOLERANCE
        )


def test_control_bins_open_to_the_left_differ_there():
    preds, labels = on_edges()
    confidence, correct = preds.max(dim=1).values.double(), (preds.argmax(dim=1) == labels).double()
    bins = (confidence * 15).ceil().long().clamp(1, 15)
    gaps = [(confidence - correct)[bins == b].sum().abs().item() for b in range(1, 16)]
    reference = MulticlassCalibrationError(2, n_bins=15, norm="l1")(preds, labels).item()
    assert abs(sum(gaps) / len(labels) - reference) > 1000 * TOLERANCE


@pytest.mark.parametrize(
    "sizes", [[1000], [999, 1], [0, 1000], [334, 333, 333], [1, 0, 999], [125] * 8]
)
def test_uneven_parts_put_together_give_the_complete(sizes):
    preds, labels = predictions()
    parts = list(zip(preds.split(sizes), labels.split(sizes), strict=True))
    full = MulticlassCalibrationError(4, n_bins=15, norm="l1")(preds, labels).item()
    assert put_together(CalibrationError, parts).item() == pytest.approx(full, abs=TOLERANCE)


def test_control_a_mean_of_the_parts_own_errors_is_something_else():
    preds, labels = predictions()
    full, part, rest = (
        MulticlassCalibrationError(4)(preds[s], labels[s]).item()
        for s in (slice(0, 1000), slice(0, 1), slice(1, 1000))
    )
    assert abs((part + rest) / 2 - full) > 1000 * TOLERANCE


def test_calibration_error_survives_a_network_that_diverged():
    metric = CalibrationError()
    metric.update(torch.full((3, 2), torch.nan), torch.zeros(3, dtype=torch.int64))
    assert metric.compute().isnan()


def losses() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weights = torch.tensor([0.25, 4.0])[torch.arange(100) % 2]
    # the rare class is the harder one
    return weights + torch.rand(100, generator=generator), weights


@pytest.mark.parametrize("sizes", [[100], [99, 1], [33, 33, 34], [0, 50, 50]])
def test_mean_loss_is_the_weighted_mean_over_all_parts(sizes):
    values, weights = losses()
    parts = [
        ((v * w).sum(), w.sum())
        for v, w in zip(values.split(sizes), weights.split(sizes), strict=True)
    ]
    metric = MeanLoss()
    for part in parts:
        metric.update(*part)
    expected = np.average(values.numpy(), weights=weights.numpy())
    assert metric.compute().item() == pytest.approx(expected, rel=TOLERANCE)
    metric.reset()
    for loss_sum, weight in parts[::-1]:
        metric.update(loss_sum, weight)
    assert metric.compute().item() == pytest.approx(expected, rel=TOLERANCE)


def test_control_torchmetrics_mean_forgets_the_weights():
    values, weights = losses()
    metric = MeanMetric(nan_strategy="disable")
    metric.update(values, weights)
    assert metric.compute().item() == pytest.approx(values.mean().item(), rel=TOLERANCE)
    assert abs(metric.compute().item() - np.average(values.numpy(), weights=weights.numpy())) > 0.01


def test_mean_loss_keeps_no_graph_and_adds_many_small_numbers_exactly():
    loss = torch.tensor(2.0, requires_grad=True)
    metric = MeanLoss()
    metric.update(loss * 3, torch.tensor(1.0))
    assert not metric.sum.requires_grad
    metric.reset()
    metric.update(torch.tensor(2.0**25), torch.tensor(0.0))
    for _ in range(100):  # float32 would lose each of these
        metric.update(torch.tensor(1.0), torch.tensor(1.0))
    assert metric.sum.item() == 2**25 + 100


def test_metrics_of_a_split_by_hand():
    # Rows: right class. Columns: predicted. One class is never predicted, as happens in small splits.
    confusion = np.array([[3, 1, 0], [2, 4, 0], [0, 1, 0]])
    labels, predicted = (
        np.repeat(axis.ravel(), confusion.ravel()) for axis in np.indices(confusion.shape)
    )
    values = split_metrics(3)(torch.from_numpy(predicted), torch.from_numpy(labels))
    values |= class_metrics(values["confusion_matrix"])
    assert values["accuracy"].item() == pytest.approx(7 / 11)  # images, not classes, count
    assert values["precision"].tolist() == pytest.approx([3 / 5, 4 / 6, math.nan], nan_ok=True)
    assert values["recall"].tolist() == pytest.approx([3 / 4, 4 / 6, 0])
    assert values["f1"].item() == pytest.approx(np.mean([2 * 3 / (4 + 5), 2 * 4 / (6 + 6), 0]))
    assert values["confusion_matrix"].tolist() == confusion.tolist()


def test_numbers_of_classes_equal_torchmetrics_where_all_have_images_and_are_predicted():
    preds, labels = predictions()
    values = class_metrics(split_metrics(4)(preds, labels)["confusion_matrix"])
    for name, kind in (("precision", MulticlassPrecision), ("recall", MulticlassRecall)):
        np.testing.assert_allclose(
            values[name], kind(4, average=None)(preds, labels), atol=TOLERANCE
        )
    np.testing.assert_allclose(
        values["f1"], MulticlassF1Score(4, average="macro")(preds, labels), atol=TOLERANCE
    )


@pytest.mark.parametrize("num_predicted", [0, 2])  # that are taken for the class without images
def test_a_class_without_images_has_no_recall_and_no_part_in_the_mean(num_predicted):
    confusion = torch.tensor([[3, 1, 0], [2, 4, num_predicted], [0, 0, 0]])
    values = class_metrics(confusion)
    assert (
        values["recall"][:2].tolist() == pytest.approx([3 / 4, 4 / (6 + num_predicted)])
        and values["recall"][2].isnan()
    )
    assert values["precision"][2].isnan() if num_predicted == 0 else values["precision"][2] == 0
    assert values["f1"].item() == pytest.approx(
        np.mean([2 * 3 / (4 + 5), 2 * 4 / (6 + num_predicted + 5)])
    )
    labels, predicted = torch.tensor([0, 1, 1]), torch.tensor([0, 1, 2])
    control = MulticlassF1Score(3, average="macro")(predicted, labels)  # takes its 0 into the mean
    assert control < class_metrics(split_metrics(3)(predicted, labels)["confusion_matrix"])["f1"]


@pytest.mark.parametrize("sizes", [[997, 3], [1, 499, 500]])
def test_all_metrics_of_a_split_are_sums_over_parts(sizes):
    preds, labels = predictions()
    full = split_metrics(4)(preds, labels)
    for name in full:
        parts = list(zip(preds.split(sizes), labels.split(sizes), strict=True))
        value = put_together(lambda name=name: split_metrics(4)[name], parts)
        np.testing.assert_allclose(value, full[name], atol=TOLERANCE)


class WithoutFloat64(TorchDispatchMode):
    """Lets the device "meta", which has no data, behave as Apple's: it refuses float64, and gives its data (zeros)."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_copy = func is torch.ops.aten._to_copy.default and args[0].device.type == "meta"
        if is_copy and torch.device(kwargs.get("device", "meta")).type == "cpu":
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        result = func(*args, **kwargs)
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.device.type == "meta"
                and tensor.dtype == torch.float64
            ):
                raise TypeError(
                    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support it"
                )
        return result


def measured_without_float64() -> dict[str, torch.Tensor]:
    """Train's and evaluation's metrics and a prediction on such a device."""
    model = Classifier(["a", "b", "c"], "small_cnn", weights=None).eval()
    with WithoutFloat64():
        model.to("meta")
        logits, labels = (
            model(torch.zeros(4, 3, 28, 28, dtype=torch.uint8, device="meta")),
            torch.zeros(4).long(),
        )
        loss, weight = logits.sum(), torch.tensor(4.0, device="meta")
        for metric in (model.val_metrics.calibration_error, model.train_metrics.train_loss):
            update = (
                (logits.softmax(1), labels.to("meta"))
                if isinstance(metric, CalibrationError)
                else (loss, weight)
            )
            metric.update(*update)
            restore_sums(metric, global_sums(metric), is_rank_zero=True)
            metric.reset()
            metric.update(*update)
            if isinstance(metric, CalibrationError):  # the other's weight, of a stand-in, is 0
                metric.compute()
        sums = (
            model.train_metrics.train_loss,
            model.val_metrics.loss,
            model.val_metrics.calibration_error,
        )
        states = {name: getattr(metric, name) for metric in sums for name in metric._defaults}
        model._trainer = SimpleNamespace(strategy=None, state=SimpleNamespace(fn="fit"))
        batch = {
            "image": torch.zeros(4, 3, 28, 28, dtype=torch.uint8, device="meta"),
            "index": labels,
            "bad": [],
        }
        return {**states, "probabilities": model.predict_step(batch, 0)["probabilities"]}


def test_sums_and_probabilities_are_in_float64_also_where_the_device_has_none(monkeypatch):
    with pytest.raises(TypeError, match="float64"):  # the control
        measured_without_float64()
    monkeypatch.setattr("finetune.training.precision.WITHOUT_FLOAT64", kinds := {"mps", "meta"})
    monkeypatch.setattr("finetune.training.precise_sums.WITHOUT_FLOAT64", kinds)
    for tensor in measured_without_float64().values():
        assert (tensor.device.type, tensor.dtype) == ("cpu", torch.float64)
