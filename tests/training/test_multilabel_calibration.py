"""Scale, bias and threshold of each label, fitted on validation images."""

import numpy as np
import pytest
import torch
from promise import promise
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.metrics import f1_score, precision_score, recall_score

from finetune.system.messages import WrongUsage
from finetune.training.calibration import read_calibration
from finetune.training.logit_histogram import histogram
from finetune.training.multilabel_calibration import (
    LEAST_TO_CHOOSE,
    MultilabelCalibration,
    MultilabelCalibrator,
    fit_multilabel_calibration,
    fit_scale_and_bias,
    label_calibration_errors,
)
from finetune.training.temperature import PRIOR
from finetune.training.threshold import LabelAim, parse_label_aim

NAMES = ["a", "b", "c", "d"]
GRID = np.linspace(0, 1, 100)  # quantiles


def drawn(num: int = 2000, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and labels: those of `a` are right, of `b` too sure, of `c` shifted, and `d` is rare."""
    rng = np.random.default_rng(seed)
    true = rng.normal(size=(num, 4)) * 2 - [0, 1, 1, 5]
    labels = rng.random((num, 4)) < expit(true)
    logits = true * [1, 3, 1, 1] + [0, 0, 2, 0]
    return torch.from_numpy(logits), torch.from_numpy(labels.astype(np.float32))


def fitted(logits, labels, aim=None) -> MultilabelCalibration:
    return fit_multilabel_calibration(logits, labels, aim)


def test_wrong_scales_and_biases_are_put_right():
    calibration = fitted(*drawn(20_000))
    assert calibration.scale[:3] == pytest.approx((1, 1 / 3, 1), rel=0.1)
    assert calibration.bias[:3] == pytest.approx((0, 0, -2), abs=0.15)
    assert calibration.num_images == 20_000


def test_the_fit_is_the_minimum_of_the_penalised_loss():
    logits, labels = drawn(300)
    scale, bias = fit_scale_and_bias(*histogram(logits, labels).numpy())

    def cost(parameters: np.ndarray, k: int) -> float:
        a, b = parameters
        z = a * logits[:, k].numpy() + b
        loss = np.logaddexp(0, z) - labels[:, k].numpy() * z
        return float(loss.sum() + PRIOR * (a - 1 - np.log(a)) + b**2 / 2)

    for k in range(4):
        best = minimize(
            cost, (1.0, 0.0), (k,), method="L-BFGS-B", bounds=((1e-3, None), (None, None))
        )
        # the fit has logits rounded to bins, a hundredth wide
        assert cost(np.array([scale[k], bias[k]]), k) <= best.fun + 1e-2
    assert cost(np.array([1.0, 0.0]), 1) > best.fun + 1  # control


def test_few_or_perfect_predictions_leave_the_network_as_it_is():
    logits = torch.tensor([[9.0, 9.0], [-9.0, 9.0], [9.0, 9.0]]).double()
    labels = torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, 1.0]])
    calibration = fitted(logits, labels)
    assert all(0.9 < scale < 1.5 for scale in calibration.scale)
    assert all(abs(bias) < 0.1 for bias in calibration.bias)
    empty = fitted(logits[:0], labels[:0])
    assert empty == MultilabelCalibration.unfitted(2) and empty.as_plain() is None


def calibration_error(p: np.ndarray, y: np.ndarray) -> float:
    """Return the expected calibration error over 15 bins, from the probability of each image."""
    bins = np.minimum((p * 15).astype(int), 14)
    gaps = [abs((p - y)[bins == b].sum()) for b in range(15)]
    return sum(gaps) / len(p)


def test_the_calibration_error_of_each_label_is_that_of_its_images():
    logits, labels = drawn(1000)
    calibration = fitted(*drawn(2000, seed=1))
    errors = label_calibration_errors(histogram(logits, labels), calibration)
    before = logits.sigmoid().numpy()
    p = calibration.probabilities(logits).numpy()
    y = labels.numpy()
    # bins of logits round probabilities to 0.0005, and move a few images to the next bin
    for k in range(4):
        assert errors["error"][k] == pytest.approx(calibration_error(p[:, k], y[:, k]), abs=4e-3)
        expected = calibration_error(before[:, k], y[:, k])
        assert errors["error_before_scaling"][k] == pytest.approx(expected, abs=4e-3)
    # control: those before scaling are others, and it was the second and the third that were wrong
    assert min(errors["error_before_scaling"][k] - errors["error"][k] for k in (1, 2)) > 0.02
    unfitted = label_calibration_errors(
        histogram(logits, labels), MultilabelCalibration.unfitted(4)
    )
    assert "error_before_scaling" not in unfitted
    assert unfitted["error"] == errors["error_before_scaling"]


@pytest.mark.parametrize("num", [30, 1000])
def test_the_error_by_chance_is_that_of_true_probabilities(num):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(num, 3)) * [1, 2, 1] - [0, 0, 4]
    calibration = MultilabelCalibration.unfitted(3)
    errors = []
    for _ in range(200):
        labels = rng.random(logits.shape) < expit(logits)
        counts = histogram(torch.from_numpy(logits), torch.from_numpy(labels))
        found = label_calibration_errors(counts, calibration)
        errors.append(found["error"])
    # it depends on the logits alone, and is approximate for few images in a bin
    np.testing.assert_allclose(found["error_by_chance"], np.mean(errors, axis=0), rtol=0.2)


def test_the_default_threshold_has_the_highest_f1():
    logits, labels = drawn()
    calibration = fitted(logits, labels)
    p = calibration.probabilities(logits).numpy()
    predicted = calibration.decide(torch.from_numpy(p)).numpy()
    for k in range(4):
        y = labels[:, k].numpy()
        best = max(f1_score(y, p[:, k] >= t) for t in np.quantile(p[:, k], GRID))
        # thresholds within a bin are not candidates
        assert f1_score(y, predicted[:, k]) >= best - 5e-3
    half = f1_score(labels[:, 3].numpy(), p[:, 3] >= 0.5)
    assert f1_score(labels[:, 3].numpy(), predicted[:, 3]) > half + 0.05  # control


def test_a_threshold_reaches_the_recall_with_the_highest_precision():
    logits, labels = drawn()
    calibration = fitted(logits, labels, LabelAim("recall", 0.95))
    p = calibration.probabilities(logits)
    predicted = calibration.decide(p).numpy()
    for k in range(4):
        y = labels[:, k].numpy()
        assert recall_score(y, predicted[:, k]) >= 0.95
        enough = [
            t for t in np.quantile(p[:, k], GRID) if recall_score(y, (p[:, k] >= t).numpy()) >= 0.95
        ]
        best = max(precision_score(y, (p[:, k] >= t).numpy()) for t in enough)
        assert precision_score(y, predicted[:, k]) >= best - 5e-3
    assert calibration.unreached == () and calibration.describe_unreached_aim(NAMES) == ""


def test_a_label_whose_common_threshold_misses_the_aim_is_named():
    """It has too few images for a threshold of its own, and two of six have the lowest logits of all."""
    logits, labels = drawn()
    labels[:, 0] = 0
    labels[:6, 0] = 1
    logits[:, 0] = -6.0
    logits[:6, 0] = 6.0
    aim = LabelAim("recall", 0.9)
    assert fitted(logits, labels, aim).unreached == ()  # the control
    logits[:2, 0] = -9.0
    calibration = fitted(logits, labels, aim)
    chosen = calibration.decide(calibration.probabilities(logits))
    assert recall_score(labels[:, 0].numpy(), chosen[:, 0].numpy()) == pytest.approx(4 / 6)
    assert calibration.describe_unreached_aim(NAMES) == "recall 0.9 is not reached for a"


def test_an_aim_that_a_label_cannot_reach_is_named():
    logits, labels = drawn()
    logits[:, 3] = 0.0
    calibration = fitted(logits, labels, LabelAim("precision", 0.9))
    assert calibration.unreached == (3,)
    assert calibration.describe_unreached_aim(NAMES) == "precision 0.9 is not reached for d"
    assert calibration.thresholds[3] == fitted(logits, labels).thresholds[3]
    assert any("precision 0.9 is not reached for d" in line for line in calibration.describe(NAMES))


def test_labels_with_few_images_share_a_threshold():
    logits, labels = drawn()
    for k, num in ((2, LEAST_TO_CHOOSE - 1), (3, 0)):
        labels[:, k] = 0
        labels[:num, k] = 1
    calibration = fitted(logits, labels)
    assert calibration.thresholds[2] == calibration.thresholds[3]
    assert len(set(calibration.thresholds)) == 3
    # it is the best one for all labels together
    p = calibration.probabilities(logits).flatten()
    y = labels.flatten().numpy()
    found = f1_score(y, (p >= calibration.thresholds[2]).numpy())
    assert found >= max(f1_score(y, (p >= t).numpy()) for t in np.linspace(0.02, 0.98, 97)) - 2e-3


@promise("exact-metrics")
def test_devices_fit_the_same_calibration_bit_for_bit():
    logits, labels = drawn(500)
    metric = MultilabelCalibrator(4)
    for rows in (slice(0, 3), slice(3, 450), slice(450, 500)):
        metric.update(logits[rows], labels[rows])
    assert metric.take() == fitted(logits, labels)
    assert metric.histogram.counts.sum() == 0  # it is reset
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    assert fitted(logits[order], labels[order]) == fitted(logits, labels)


def stored(calibration: MultilabelCalibration, **changes) -> dict:
    return {
        "hyper_parameters": {"class_names": NAMES, "label_kind": "several"},
        "finetune": {"calibration": {**(calibration.as_plain() or {}), **changes}},
    }


@pytest.mark.parametrize("aim", [None, LabelAim("recall", 0.9), LabelAim("accuracy")])
def test_a_checkpoint_keeps_it(aim):
    calibration = fitted(*drawn(300), aim)
    assert read_calibration(stored(calibration)) == calibration
    missing = stored(calibration)
    missing["finetune"]["calibration"] = None
    assert read_calibration(missing) == MultilabelCalibration.unfitted(4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scale", [1.0] * 3),
        ("scale", [0.0] * 4),
        ("bias", [float("nan")] * 4),
        ("bias", 0.0),
        ("thresholds", [1.5] * 4),
        ("num_pictures", 0),
        ("aim", {"measure": "luck", "least": None}),
        ("aim", {"measure": "recall", "least": None}),
        ("aim", {"measure": "f1", "least": 0.5}),
        ("unreached", [4]),
        ("more", 1),
    ],
)
def test_values_that_no_fit_writes_are_refused(name, value):
    with pytest.raises(ValueError, match="the checkpoint is not as `finetune fit` writes them"):
        read_calibration(stored(fitted(*drawn(300)), **{name: value}))


def test_an_aim_applies_to_each_label():
    assert parse_label_aim("recall:0.95") == LabelAim("recall", 0.95)
    assert parse_label_aim("f1") == LabelAim("f1")
    for text in ("recall", "recall:2", "recall:0.9:a", "f1:a", "luck"):
        with pytest.raises(WrongUsage, match="which is applied to each label"):
            parse_label_aim(text)


def test_a_calibration_is_described():
    lines = fitted(*drawn(300)).describe(NAMES)
    assert lines[0].startswith("calibration of each label, fitted on 300 validation images: scale ")
    assert lines[1].startswith("thresholds for the highest f1: a 0.")
    assert "not calibrated" in MultilabelCalibration.unfitted(4).describe(NAMES)[0]
