"""Metrics of one label and of several labels an image, compared with torchmetrics and scikit-learn, on any devices."""

import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from metric_parts import put_together
from sklearn import metrics
from torch import Tensor
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)

from finetune.runs.best_epoch import standard_error
from finetune.training.calibration import Calibration
from finetune.training.logit_histogram import (
    LogitHistogram,
    average_precision,
    histogram,
    mean_average_precision,
)
from finetune.training.metrics import CalibrationError, MeanLoss, class_metrics
from finetune.training.multilabel_calibration import MultilabelCalibration
from finetune.training.multilabel_metrics import label_metrics
from finetune.training.task import task_for

NAMES = ["a", "b", "c", "d"]
# float32 results of sums of 1,000 terms below 1: a few units of 1e-7.
TOLERANCE = 1e-6
SEEDS = st.integers(0, 2**32)
CUTS = st.lists(st.integers(0, 40), max_size=4)  # where the images of one device end


def parts(cuts: list[int], *values: Tensor) -> list[tuple[Tensor, ...]]:
    """The rows of each device; some may have none."""
    num = len(values[0])
    ends = [0, *sorted(min(cut, num) for cut in cuts), num]
    return [tuple(value[begin:end] for value in values) for begin, end in pairwise(ends)]


def predictions(seed: int, num: int = 1000) -> tuple[Tensor, Tensor]:
    """Logits of four classes that are right for six images in ten, and the classes."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num, 4, generator=generator)
    random = torch.randint(4, (num,), generator=generator)
    return logits, torch.where(torch.rand(num, generator=generator) < 0.6, logits.argmax(1), random)


def labelled(seed: int, num: int = 400) -> tuple[Tensor, Tensor]:
    """Logits of four labels of which the last is rare, and the labels."""
    rng = np.random.default_rng(seed)
    labels = torch.from_numpy((rng.random((num, 4)) < [0.5, 0.3, 0.2, 0.05]).astype(np.float32))
    return torch.from_numpy(rng.normal(size=(num, 4)) * 2) + 3 * labels - 1.5, labels


FITTED = {
    "single": Calibration(temperature=0.5, num_images=9),
    "several": MultilabelCalibration(
        (0.5, 1.0, 2.0, 1.0), (0.1, -0.2, 0.0, 0.3), (0.5, 0.3, 0.7, 0.2), 9
    ),
}


def measured(
    kind: str, logits: Tensor, labels: Tensor, calibration=None, batch: int = 32
) -> tuple[dict[str, float], dict]:
    task = task_for(kind, NAMES)
    calibration = calibration or task.uncalibrated()
    metric = task.split_metrics("val")
    for rows in range(0, len(labels), batch):
        own = slice(rows, rows + batch)
        weight = torch.tensor(float(len(labels[own])))
        metric.update(logits[own], labels[own], 0.5 * weight, weight, calibration)
    values, counts = metric.take(NAMES, calibration)
    return {name: float(value) for name, value in values.items()}, counts


EDGES = torch.linspace(0, 1, 16)[8:]  # of two classes one has at least half
ON_EDGES = torch.cat(
    [
        EDGES,
        torch.nextafter(EDGES, torch.zeros(1)),
        torch.nextafter(EDGES[:-1], torch.ones(1)),
    ]
).tolist()
CONFIDENCES = st.sampled_from(ON_EDGES) | st.floats(0.5, 1, width=32)


@given(drawn=st.lists(st.tuples(CONFIDENCES, st.booleans()), min_size=1, max_size=40), cuts=CUTS)
def test_calibration_error_is_torchmetrics_on_any_devices(drawn, cuts):
    confidence = torch.tensor([each for each, _ in drawn])
    labels = torch.tensor([int(is_wrong) for _, is_wrong in drawn])
    preds = torch.stack([confidence, 1 - confidence], dim=1)
    expected = MulticlassCalibrationError(2, n_bins=15, norm="l1")(preds, labels).item()
    found = put_together(CalibrationError, parts(cuts, preds, labels)).item()
    assert found == pytest.approx(expected, abs=TOLERANCE)


def test_metrics_of_one_label_are_those_of_torchmetrics():
    logits, labels = predictions(0)
    values, counts = measured("single", logits, labels)
    preds = logits.softmax(dim=1)
    expected = {
        "accuracy": MulticlassAccuracy(4, average="micro")(preds, labels),
        "f1": MulticlassF1Score(4, average="macro")(preds, labels),
        "calibration_error": MulticlassCalibrationError(4, n_bins=15, norm="l1")(preds, labels),
        "loss": 0.5,
    }
    for name, kind in (("precision", MulticlassPrecision), ("recall", MulticlassRecall)):
        of_classes = kind(4, average=None)(preds, labels)
        expected |= {f"{name}/{c}": v for c, v in zip(NAMES, of_classes, strict=True)}
    assert values == pytest.approx({k: float(v) for k, v in expected.items()}, abs=TOLERANCE)
    assert counts["confusion_matrix"] == MulticlassConfusionMatrix(4)(preds, labels).tolist()
    assert counts["loss_weight"] == 1000


@pytest.mark.parametrize("is_fitted", [False, True])
def test_metrics_of_several_labels_are_those_of_scikit_learn(is_fitted):
    logits, labels = labelled(0)
    calibration = FITTED["several"] if is_fitted else MultilabelCalibration.unfitted(4)
    values, counts = measured("several", logits, labels, calibration)
    y = labels.numpy()
    predicted = calibration.decide(calibration.probabilities(logits)).numpy().astype(int)
    expected = {
        "loss": 0.5,
        "f1_macro": metrics.f1_score(y, predicted, average="macro"),
        "f1_micro": metrics.f1_score(y, predicted, average="micro"),
        "exact_match": metrics.accuracy_score(y, predicted),
        "hamming_distance": metrics.hamming_loss(y, predicted),
    }
    for k, name in enumerate(NAMES):
        expected[f"precision/{name}"] = metrics.precision_score(y[:, k], predicted[:, k])
        expected[f"recall/{name}"] = metrics.recall_score(y[:, k], predicted[:, k])
    for name, value in expected.items():
        assert values[name] == pytest.approx(value, abs=1e-6), name
    average = metrics.average_precision_score(y, logits.numpy(), average=None)
    for name, value in zip(NAMES, average, strict=True):
        assert values[f"average_precision/{name}"] == pytest.approx(value, abs=3e-3)
    assert values["mAP"] == pytest.approx(average.mean(), abs=1e-3)
    matrices = metrics.multilabel_confusion_matrix(y, predicted)
    assert counts["label_counts"] == matrices.tolist()
    assert counts["cooccurrence"] == (y.T @ y).astype(int).tolist()
    p = calibration.probabilities(logits).numpy().ravel()
    bins = np.minimum((p * 15).astype(int), 14)
    gaps = [abs(p[bins == b].sum() - y.ravel()[bins == b].sum()) for b in range(15)]
    assert values["calibration_error"] == pytest.approx(sum(gaps) / len(p), abs=1e-6)


@pytest.mark.parametrize("num_predicted", [0, 2])  # that are taken for the class without images
def test_a_class_without_images_has_no_recall_and_no_part_in_f1(num_predicted):
    confusion = torch.tensor([[3, 1, 0], [2, 4, num_predicted], [0, 0, 0]])
    values = class_metrics(confusion)
    recall = [3 / 4, 4 / (6 + num_predicted), np.nan]
    assert values["recall"].tolist() == pytest.approx(recall, nan_ok=True)
    assert values["precision"][2].isnan() if num_predicted == 0 else values["precision"][2] == 0
    f1 = np.mean([2 * 3 / (4 + 5), 2 * 4 / (6 + num_predicted + 5)])
    assert values["f1"].item() == pytest.approx(f1)
    labels, predicted = torch.tensor([0, 1, 1]), torch.tensor([0, 1, 2])
    control = MulticlassF1Score(3, average="macro")(predicted, labels)  # takes its 0 into the mean
    ours = class_metrics(MulticlassConfusionMatrix(3)(predicted, labels))
    assert control < ours["f1"]


def test_images_without_labels_and_labels_without_images():
    logits, labels = labelled(0)
    labels[:, 2] = 0
    labels[:50] = 0
    logits[:, 3] = -9.0
    values, _ = measured("several", logits, labels)
    assert np.isnan(values["recall/c"]) and np.isnan(values["average_precision/c"])
    assert np.isnan(values["precision/d"]) and values["recall/d"] == 0
    predicted = (logits > 0).numpy()[:, [0, 1, 3]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = metrics.f1_score(labels.numpy()[:, [0, 1, 3]], predicted, average="macro")
    assert values["f1_macro"] == pytest.approx(expected)
    # nothing is right and nothing is wrong
    assert label_metrics(torch.zeros(2, 2, 2))["f1_micro"].isnan()


@given(seed=SEEDS, cuts=CUTS)
def test_the_mean_loss_is_the_weighted_mean_of_all_devices(seed, cuts):
    rng = np.random.default_rng(seed)
    values = rng.random(40) * 9
    weights = rng.choice([0.25, 4.0], 40)

    class OfImages(MeanLoss):
        def update(self, values: Tensor, weights: Tensor) -> None:
            super().update((values * weights).sum(), weights.sum())

    tensors = torch.from_numpy(values), torch.from_numpy(weights)
    found = put_together(OfImages, parts(cuts, *tensors)).item()
    assert found == pytest.approx(np.average(values, weights=weights), rel=TOLERANCE)


@pytest.mark.parametrize("way", ["half", torch.bfloat16])
def test_sums_stay_in_float64_whatever_the_precision_of_the_network(way):
    """By `half()` and its like, and by `to`, as Lightning has it for `bf16-true` and torchmetrics does not know."""
    metric = MeanLoss()
    loss = torch.tensor(2.0**25 / 3, dtype=torch.float64, requires_grad=True)
    metric.update(loss, torch.tensor(0.0))
    module = torch.nn.ModuleDict({"metric": metric, "layer": torch.nn.Linear(2, 2)})
    module = getattr(module, way)() if isinstance(way, str) else module.to(way)
    dtype = way if isinstance(way, torch.dtype) else getattr(torch, way)
    assert module["layer"].weight.dtype == dtype
    for _ in range(100):  # float32 would lose each of these
        metric.update(torch.tensor(1.0), torch.tensor(1.0))
    assert metric.sum.item() == 2**25 / 3 + 100
    assert not metric.sum.requires_grad  # or it would keep the graph of each step


@given(
    seed=SEEDS,
    num=st.integers(500, 3000),
    spread=st.sampled_from([(0.0, 1.0), (2.0, 1.0), (2.0, 4.0), (5.0, 3.0)]),
    cuts=CUTS,
)
def test_mean_average_precision_is_scikit_learns_on_any_devices(seed, num, spread, cuts):
    margin, scale = spread
    rng = np.random.default_rng(seed)
    labels = (rng.random((num, 8)) < rng.uniform(0.02, 0.5, 8)).astype(np.float32)
    labels[:2] = 1.0
    logits = scale * (rng.normal(size=labels.shape) + margin * (labels - 0.5) - 1)
    each = [metrics.average_precision_score(*pair) for pair in zip(labels.T, logits.T, strict=True)]
    tensors = torch.from_numpy(logits), torch.from_numpy(labels)
    counts = put_together(lambda: LogitHistogram(8), parts(cuts, *tensors))
    found = float(mean_average_precision(average_precision(counts)))
    assert abs(found - np.mean(each)) <= 1e-3
    assert torch.equal(counts, histogram(*tensors))


@given(num=st.integers(1, 199), seed=SEEDS)
def test_a_perfect_order_has_an_average_precision_of_at_most_1(num, seed):
    """Rounding must not carry it above: a fit takes the root of m (1 - m) for the standard error."""
    logits = torch.linspace(6, -6, 200)[:, None]
    labels = (torch.arange(200) < num).float()[:, None]
    order = torch.randperm(200, generator=torch.Generator().manual_seed(seed))
    score = task_for("several", ["cat"]).score(logits[order], labels[order])
    assert 1 - 1e-12 < score <= 1 and standard_error(score, num) < 1e-6


def test_equal_logits_count_in_the_mean_of_their_orders():
    labels = torch.tensor([[1.0], [0.0], [1.0], [0.0], [0.0]])
    logits = torch.tensor([[5.0], [1.0], [1.0], [1.0], [-3.0]])
    # the second positive is at rank 2, 3 or 4
    each = [(1 + 2 / rank) / 2 for rank in (2, 3, 4)]
    found = average_precision(histogram(logits, labels))
    assert float(found[0]) == pytest.approx(np.mean(each), abs=1e-12)
