"""Metrics of several labels, compared with scikit-learn's, on any number of devices."""

import warnings

import numpy as np
import pytest
import torch
from sklearn import metrics

from finetune.training.multilabel_calibration import MultilabelCalibration
from finetune.training.multilabel_metrics import (
    Cooccurrence,
    MultilabelSplitMetrics,
    MultilabelTrainMetrics,
    label_metrics,
)

NAMES = ["a", "b", "c", "d"]
RNG = np.random.default_rng(0)
LABELS = torch.from_numpy((RNG.random((400, 4)) < [0.5, 0.3, 0.2, 0.05]).astype(np.float32))
LOGITS = torch.from_numpy(RNG.normal(size=(400, 4)) * 2) + 3 * LABELS - 1.5
FITTED = MultilabelCalibration((0.5, 1.0, 2.0, 1.0), (0.1, -0.2, 0.0, 0.3), (0.5, 0.3, 0.7, 0.2), 9)
UNFITTED = MultilabelCalibration.unfitted(4)


def measured(
    logits=LOGITS, labels=LABELS, calibration=FITTED, batch: int = 32
) -> tuple[dict[str, float], dict]:
    metric = MultilabelSplitMetrics(4, "val")
    for rows in range(0, len(labels), batch):
        own = slice(rows, rows + batch)
        weight = torch.tensor(float(len(labels[own])))
        metric.update(logits[own], labels[own], 0.5 * weight, weight, calibration)
    values, counts = metric.take(NAMES, calibration)
    return {name: float(value) for name, value in values.items()}, counts


@pytest.mark.parametrize("calibration", [UNFITTED, FITTED])
def test_metrics_are_those_of_scikit_learn(calibration):
    values, counts = measured(calibration=calibration)
    y = LABELS.numpy()
    predicted = calibration.decide(calibration.probabilities(LOGITS)).numpy().astype(int)
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
    average = metrics.average_precision_score(y, LOGITS.numpy(), average=None)
    for name, value in zip(NAMES, average, strict=True):
        assert values[f"average_precision/{name}"] == pytest.approx(value, abs=3e-3)
    assert values["mAP"] == pytest.approx(average.mean(), abs=1e-3)
    matrices = metrics.multilabel_confusion_matrix(y, predicted)
    assert counts["label_counts"] == matrices.tolist()
    assert counts["cooccurrence"] == (y.T @ y).astype(int).tolist()
    other, _ = measured(calibration=UNFITTED if calibration is FITTED else FITTED)
    assert abs(other["f1_macro"] - values["f1_macro"]) > 1e-2  # control


def test_the_calibration_error_is_that_of_all_pairs_of_image_and_label():
    values, _ = measured()
    p = FITTED.probabilities(LOGITS).numpy().ravel()
    y = LABELS.numpy().ravel()
    bins = np.minimum((p * 15).astype(int), 14)
    error = sum(
        abs(p[bins == b].sum() - y[bins == b].sum()) for b in range(15) if (bins == b).any()
    )
    assert values["calibration_error"] == pytest.approx(error / len(p), abs=1e-6)
    before, _ = measured(calibration=UNFITTED)
    assert values["calibration_error_before_scaling"] == pytest.approx(before["calibration_error"])
    assert "calibration_error_before_scaling" not in before


def test_batches_make_no_difference():
    values, counts = measured()
    for batch in (1, 7, 400):
        other, other_counts = measured(batch=batch)
        assert counts == other_counts
        assert other == pytest.approx(values, rel=1e-6)


def test_metrics_are_reset():
    metric = MultilabelSplitMetrics(4, "val")
    one = torch.ones(())
    metric.update(LOGITS, LABELS, one, one, UNFITTED)
    first = metric.take(NAMES, UNFITTED)
    metric.update(LOGITS, LABELS, one, one, UNFITTED)
    assert metric.take(NAMES, UNFITTED) == first


def test_images_without_labels_and_labels_without_images():
    labels = LABELS.clone()
    labels[:, 2] = 0
    labels[:50] = 0
    logits = LOGITS.clone()
    logits[:, 3] = -9.0
    values, _ = measured(logits, labels, UNFITTED)
    assert np.isnan(values["recall/c"]) and np.isnan(values["average_precision/c"])
    assert np.isnan(values["precision/d"]) and values["recall/d"] == 0
    predicted = (logits > 0).numpy()[:, [0, 1, 3]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = metrics.f1_score(labels.numpy()[:, [0, 1, 3]], predicted, average="macro")
    assert values["f1_macro"] == pytest.approx(expected)
    # nothing is right and nothing is wrong
    assert label_metrics(torch.zeros(2, 2, 2))["f1_micro"].isnan()


def test_training_metrics_continue_from_their_sums():
    def update(metric: MultilabelTrainMetrics, rows: slice) -> None:
        num = torch.tensor(float(len(LABELS[rows])))
        metric.update(LOGITS[rows], LABELS[rows], 2 * num, num)

    full = MultilabelTrainMetrics(4)
    update(full, slice(0, 400))
    first = MultilabelTrainMetrics(4)
    update(first, slice(0, 100))
    resumed = MultilabelTrainMetrics(4)
    resumed.restore(first.sums(), is_rank_zero=True)
    update(resumed, slice(100, 400))
    found = resumed.take()
    assert found == full.take()
    expected = metrics.f1_score(LABELS.numpy(), (LOGITS > 0).numpy(), average="micro")
    assert float(found["train/f1_micro"]) == pytest.approx(expected)
    assert float(found["train/loss_epoch"]) == 2


def test_labels_that_occur_together_are_counted():
    metric = Cooccurrence(3)
    metric.update(torch.tensor([[1, 1, 0]]))
    metric.update(torch.tensor([[1, 0, 0]]))
    assert metric.compute().tolist() == [[2, 1, 0], [1, 1, 0], [0, 0, 0]]
