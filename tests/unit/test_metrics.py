"""Metrics of one label and of several labels an image, compared with torchmetrics and scikit-learn."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from promise import promise
from sklearn import metrics
from torch import Tensor
from torchmetrics.classification import (
    BinaryCalibrationError,
    MulticlassAccuracy,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
    MultilabelF1Score,
)

from finetune.runs.best_epoch import standard_error
from finetune.training.calibration import Calibration
from finetune.training.measure import (
    calibration_error,
    measure,
    measure_classes,
    measure_labels,
)
from finetune.training.metrics import TrainMetrics
from finetune.training.outputs import Collector, Outputs, check_memory
from finetune.training.task import Task

NAMES = ["a", "b", "c", "d"]
# float32 results of torchmetrics
TOLERANCE = 1e-6
SEEDS = st.integers(0, 2**32)


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
    "single": Calibration("single", (2.0,), (0.0,), num_images=9),
    "several": Calibration(
        "several", (0.5, 1.0, 2.0, 1.0), (0.1, -0.2, 0.0, 0.3), (0.5, 0.3, 0.7, 0.2), 9
    ),
}
CLASS_WEIGHT = torch.tensor([0.5, 1.0, 2.0, 3.0])


def measured(
    kind: str, logits: Tensor, labels: Tensor, calibration: Calibration | None = None
) -> tuple[dict[str, float], dict]:
    task = Task(kind, NAMES)
    outputs = Outputs(torch.arange(len(labels)), logits, labels, [])
    calibration = calibration or task.uncalibrated()
    return measure(outputs, task, calibration, CLASS_WEIGHT, has_interval=False)


EDGES = torch.linspace(0, 1, 16)[8:]  # of two classes one has at least half
ON_EDGES = torch.cat(
    [
        EDGES,
        torch.nextafter(EDGES, torch.zeros(1)),
        torch.nextafter(EDGES[:-1], torch.ones(1)),
    ]
).tolist()
CONFIDENCES = st.sampled_from(ON_EDGES) | st.floats(0.5, 1, width=32)


@given(drawn=st.lists(st.tuples(CONFIDENCES, st.booleans()), min_size=1, max_size=40))
def test_calibration_error_is_that_of_torchmetrics(drawn):
    confidence = torch.tensor([each for each, _ in drawn])
    is_right = torch.tensor([int(each) for _, each in drawn])
    expected = BinaryCalibrationError(n_bins=15, norm="l1")(confidence, is_right).item()
    found = calibration_error(confidence.double().numpy(), is_right.numpy() > 0)
    assert found == pytest.approx(expected, abs=TOLERANCE)


def test_calibration_errors_are_those_before_and_after_a_temperature():
    logits, labels = predictions(0)
    error = MulticlassCalibrationError(4, n_bins=15, norm="l1")
    values, _ = measured("single", logits, labels, FITTED["single"])
    expected = [error((scale * logits).softmax(dim=1), labels).item() for scale in (2, 1)]
    names = ["calibration_error", "calibration_error_before_scaling"]
    assert [values[name] for name in names] == pytest.approx(expected, abs=TOLERANCE)
    assert values["loss"] == measured("single", logits, labels)[0]["loss"]


def test_metrics_of_one_label_are_those_of_torchmetrics():
    logits, labels = predictions(0)
    values, counts = measured("single", logits, labels)
    preds = logits.softmax(dim=1)
    expected = {
        "accuracy": MulticlassAccuracy(4, average="micro")(preds, labels),
        "f1": MulticlassF1Score(4, average="macro")(preds, labels),
        "calibration_error": MulticlassCalibrationError(4, n_bins=15, norm="l1")(preds, labels),
        "loss": torch.nn.CrossEntropyLoss(CLASS_WEIGHT)(logits, labels),
    }
    for name, kind in (("precision", MulticlassPrecision), ("recall", MulticlassRecall)):
        of_classes = kind(4, average=None)(preds, labels)
        expected |= {f"{name}/{c}": v for c, v in zip(NAMES, of_classes, strict=True)}
    assert values == pytest.approx({k: float(v) for k, v in expected.items()}, abs=TOLERANCE)
    assert counts["confusion_matrix"] == MulticlassConfusionMatrix(4)(preds, labels).tolist()
    assert counts["loss_weight"] == pytest.approx(float(CLASS_WEIGHT[labels].sum()))
    # scikit-learn computes in float64
    y, top = labels.numpy(), preds.argmax(dim=1).numpy()
    assert values["accuracy"] == metrics.accuracy_score(y, top)
    assert values["f1"] == pytest.approx(metrics.f1_score(y, top, average="macro"), rel=1e-12)
    loss = metrics.log_loss(y, logits.double().softmax(1).numpy(), sample_weight=CLASS_WEIGHT[y])
    assert values["loss"] == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("is_fitted", [False, True])
def test_metrics_of_several_labels_are_those_of_scikit_learn(is_fitted):
    logits, labels = labelled(0)
    calibration = FITTED["several"] if is_fitted else Calibration.unfitted("several", 4)
    values, counts = measured("several", logits, labels, calibration)
    y = labels.numpy()
    predicted = calibration.decide(calibration.probabilities(logits)).numpy().astype(int)
    expected = {
        "loss": torch.nn.BCEWithLogitsLoss(pos_weight=CLASS_WEIGHT.double())(
            logits, labels.double()
        ).item(),
        "f1_macro": metrics.f1_score(y, predicted, average="macro"),
        "f1_micro": metrics.f1_score(y, predicted, average="micro"),
        "exact_match": metrics.accuracy_score(y, predicted),
        "hamming_distance": metrics.hamming_loss(y, predicted),
    }
    for k, name in enumerate(NAMES):
        expected[f"precision/{name}"] = metrics.precision_score(y[:, k], predicted[:, k])
        expected[f"recall/{name}"] = metrics.recall_score(y[:, k], predicted[:, k])
    for name, value in expected.items():
        assert values[name] == pytest.approx(value, rel=1e-12), name
    average = metrics.average_precision_score(y, logits.numpy(), average=None)
    for name, value in zip(NAMES, average, strict=True):
        assert values[f"average_precision/{name}"] == pytest.approx(value, rel=1e-12)
    assert values["mAP"] == pytest.approx(average.mean(), rel=1e-12)
    matrices = metrics.multilabel_confusion_matrix(y, predicted)
    assert counts["label_counts"] == matrices.tolist()
    assert counts["cooccurrence"] == (y.T @ y).astype(int).tolist()
    p = calibration.probabilities(logits)
    error = BinaryCalibrationError(n_bins=15, norm="l1")
    found = values["calibration_error"]
    assert found == pytest.approx(error(p.flatten(), labels.flatten().long()).item(), abs=1e-6)
    name = "calibration_error_before_scaling"
    assert (name in values) == is_fitted
    if is_fitted:
        before = error(logits.sigmoid().flatten(), labels.flatten().long()).item()
        assert values[name] == pytest.approx(before, abs=1e-6)


@pytest.mark.parametrize("num_predicted", [0, 2])  # that are taken for the class without images
def test_a_class_without_images_has_no_recall_and_no_part_in_f1(num_predicted):
    confusion = np.array([[3, 1, 0], [2, 4, num_predicted], [0, 0, 0]])
    pairs = np.repeat(np.argwhere(confusion >= 0), confusion.ravel(), axis=0)
    values, _ = measure_classes(*pairs.T, NAMES[:3])
    recall = [3 / 4, 4 / (6 + num_predicted), np.nan]
    assert [values[f"recall/{c}"] for c in "abc"] == pytest.approx(recall, nan_ok=True)
    precision = values["precision/c"]
    assert np.isnan(precision) if num_predicted == 0 else precision == 0
    f1 = np.mean([2 * 3 / (4 + 5), 2 * 4 / (6 + num_predicted + 5)])
    assert values["f1"] == pytest.approx(f1)
    labels, predicted = torch.tensor([0, 1, 1]), torch.tensor([0, 1, 2])
    control = MulticlassF1Score(3, average="macro")(predicted, labels)  # takes its 0 into the mean
    ours, _ = measure_classes(labels.numpy(), predicted.numpy(), NAMES[:3])
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
    none = np.zeros((3, 2), bool)
    values, _ = measure_labels(none + 0.0, none + 0.0, none, none, NAMES[:2], has_interval=True)
    assert np.isnan(values["f1_micro"]) and np.isnan(values["mAP"]) and values["exact_match"] == 1


@given(seed=SEEDS, kind=st.sampled_from(["single", "several"]), num=st.integers(1, 40))
def test_metrics_of_training_are_those_of_all_batches(seed, kind, num):
    logits, labels = predictions(seed, num) if kind == "single" else labelled(seed, num)
    rng = np.random.default_rng(seed)
    losses, weights = torch.from_numpy(rng.random((2, num)))
    reference = {
        "single": MulticlassAccuracy(4, average="micro"),
        "several": MultilabelF1Score(4, average="micro"),
    }[kind]
    shares = [TrainMetrics(kind), TrainMetrics(kind)]  # of two devices
    for i, rows in enumerate(np.array_split(rng.permutation(num), 4)):
        loss = (losses * weights)[rows].sum().requires_grad_()
        shares[i % 2].update(logits[rows].bfloat16(), labels[rows], loss, weights[rows].sum())
    sums = [each.sums(torch.device("cpu"), 1) for each in shares]
    assert not any(each.requires_grad for each in sums)  # or they would keep the graph of each step
    resumed = TrainMetrics(kind)
    resumed.restore(sums[0] + sums[1], is_rank_zero=True)
    found = resumed.take(torch.device("cpu"), 1)
    expected = np.average(losses, weights=weights)
    assert float(found.pop("train/loss_epoch")) == pytest.approx(expected, rel=TOLERANCE)
    (score,) = found.values()
    preds = logits.bfloat16() if kind == "single" else (logits.bfloat16() > 0).long()
    assert float(score) == pytest.approx(float(reference(preds, labels.long())), rel=TOLERANCE)
    with pytest.raises(ValueError, match="skipped"):  # it has begun anew
        resumed.take(torch.device("cpu"), 1)


def drop_the_last_batch(monkeypatch):
    add = Collector.add
    monkeypatch.setattr(Collector, "add", lambda *args: len(args[2]) > 1 and add(*args))


@promise("exact-metrics", controls=[drop_the_last_batch])
@given(seed=SEEDS, kind=st.sampled_from(["single", "several"]), cut=st.integers(1, 39))
def test_outputs_are_in_the_order_of_the_images_whatever_the_batches(seed, kind, cut):
    logits, labels = predictions(seed, 40) if kind == "single" else labelled(seed, 40)
    order = np.random.default_rng(seed).permutation(40)
    collector = Collector()
    for rows in (order[:cut], order[cut:39], order[39:]):
        batch = {"index": torch.from_numpy(rows), "label": labels[rows], "bad": []}
        collector.add({**batch, "bad": [(99 - len(rows), "torn")]}, logits[rows])
    outputs = collector.own()
    assert outputs.index.tolist() == list(range(40)) and len(outputs.bad) == 3
    assert outputs.bad == sorted(outputs.bad)
    assert outputs.logits.equal(logits) and outputs.labels.equal(labels)
    task = Task(kind, NAMES)
    found = measure(outputs, task, FITTED[kind], CLASS_WEIGHT, has_interval=True)
    whole = Outputs(outputs.index, logits, labels, [])
    expected = measure(whole, task, FITTED[kind], CLASS_WEIGHT, has_interval=True)
    assert str(found) == str(expected)  # bit for bit, with NaN
    values, tables = measure(
        whole, task, FITTED[kind], CLASS_WEIGHT, has_interval=True, has_pairs=False
    )
    assert str(values) == str(expected[0])
    assert expected[1].keys() - tables.keys() == {
        "confusion_matrix" if kind == "single" else "cooccurrence"
    }


@given(num=st.integers(1, 199), seed=SEEDS)
def test_a_perfect_order_has_an_average_precision_of_at_most_1(num, seed):
    """Rounding must not carry it above: a fit takes the root of m (1 - m) for the standard error."""
    logits = torch.linspace(6, -6, 200)[:, None]
    labels = (torch.arange(200) < num).float()[:, None]
    order = torch.randperm(200, generator=torch.Generator().manual_seed(seed))
    score = Task("several", ["cat"]).score(logits[order], labels[order])
    assert 1 - 1e-12 < score <= 1 and standard_error(score, num) < 1e-6


def test_what_does_not_fit_into_memory_is_refused_in_a_line():
    check_memory("test", 50_000, 1000, "single")
    check_memory("val", 1, 10**6, "single", has_pairs=False)
    with pytest.raises(ValueError, match="limit_val_batches"):  # the confusion matrix
        check_memory("val", 1, 10**6, "single")
    for kind in ("single", "several"):
        with pytest.raises(ValueError, match="limit_test_batches") as caught:
            check_memory("test", 10**9, 10**6, kind)
        assert "\n" not in str(caught.value)
