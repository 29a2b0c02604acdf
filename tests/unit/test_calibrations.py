"""Probabilities of one label and of several labels, calibrated on validation images, and what a checkpoint keeps."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from metric_parts import put_together
from promise import promise
from scipy.optimize import minimize, minimize_scalar
from scipy.special import expit
from torch import Tensor
from torchmetrics import Metric

from finetune.training.calibration import Calibration, read_calibration
from finetune.training.logit_histogram import histogram
from finetune.training.multilabel_calibration import (
    MultilabelCalibration,
    fit_multilabel_calibration,
    fit_scale_and_bias,
    label_calibration_errors,
)
from finetune.training.task import task_for
from finetune.training.temperature import HIGHEST, LOWEST, PRIOR, Temperature
from finetune.training.threshold import Aim, Choice, LabelAim

SEEDS = st.integers(0, 2**32)


def temperature(logits: Tensor, labels: Tensor) -> float:
    metric = Temperature()
    metric.update(logits, labels)
    return metric.compute().item()


@st.composite
def validated(draw) -> tuple[Tensor, Tensor]:
    """Logits of a network that is too sure or not sure enough, and classes; or all is right, or all is wrong."""
    num_classes = draw(st.sampled_from([2, 5, 100]))
    num = draw(
        st.sampled_from([1, 5, 160, 500])
    )  # with 100 classes the last is more than one chunk
    generator = torch.Generator().manual_seed(draw(SEEDS))
    logits = 2 * torch.randn(num, num_classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(dim=1), 1, generator=generator).squeeze(1)
    kind = draw(st.sampled_from(["drawn", "drawn", "right", "wrong"]))
    if kind != "drawn":
        labels = logits.argmax(dim=1) if kind == "right" else logits.argmin(dim=1)
    return logits * draw(st.sampled_from([0.01, 0.2, 0.7, 1.0, 2.5, 30.0])), labels


@given(images=validated(), cut=st.integers(0, 600))
def test_the_temperature_is_the_minimum_that_scipy_finds_on_any_devices(images, cut):
    logits, labels = images

    def loss(log_inverse: float) -> float:
        b = math.exp(log_inverse)
        prior = PRIOR * (b - 1 - log_inverse)
        return F.cross_entropy(b * logits, labels, reduction="sum").item() + prior

    bounds = (-math.log(HIGHEST), -math.log(LOWEST))
    reference = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-9})
    found = temperature(logits, labels)
    # Between its nodes, an eighth apart, the slope is taken for a cubic: 2e-5 is the most that was seen.
    assert found == pytest.approx(math.exp(-reference.x), rel=1e-4)
    devices = [(logits[:cut], labels[:cut]), (logits[cut:], labels[cut:])]
    assert put_together(Temperature, devices).item() == pytest.approx(found, rel=1e-12)


def test_the_temperature_of_one_class_and_of_half_precision_and_of_what_overflowed():
    assert temperature(torch.randn(20, 1), torch.zeros(20).long()) == pytest.approx(1, abs=1e-6)
    logits = 4 * torch.randn(100, 3, generator=torch.Generator().manual_seed(0)).double()
    rows = torch.arange(100)
    labels = rows % 3
    plain = temperature(logits, labels)
    assert temperature(logits.half(), labels) == pytest.approx(plain, rel=1e-3)
    logits[rows, (labels + 1) % 3] = -torch.inf  # a class that is ruled out, and rightly so
    ruled_out = temperature(logits, labels)
    logits[rows, (labels + 1) % 3] = -1e4
    assert ruled_out == pytest.approx(temperature(logits, labels), rel=1e-12)
    logits[0, labels[0]] = torch.inf
    assert math.isnan(temperature(logits, labels))


def drawn(num: int = 2000, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return logits and labels: those of `a` are right, of `b` too sure, of `c` shifted, and `d` is rare."""
    rng = np.random.default_rng(seed)
    true = rng.normal(size=(num, 4)) * 2 - [0, 1, 1, 5]
    labels = rng.random((num, 4)) < expit(true)
    logits = true * [1, 3, 1, 1] + [0, 0, 2, 0]
    return torch.from_numpy(logits), torch.from_numpy(labels.astype(np.float32))


@given(num=st.sampled_from([1, 5, 300]), seed=SEEDS, label=st.integers(0, 3))
def test_scale_and_bias_of_a_label_are_the_minimum_that_scipy_finds(num, seed, label):
    logits, labels = drawn(num, seed)
    scale, bias = fit_scale_and_bias(*histogram(logits, labels).numpy())

    def cost(parameters: np.ndarray) -> float:
        a, b = parameters
        z = a * logits[:, label].numpy() + b
        loss = np.logaddexp(0, z) - labels[:, label].numpy() * z
        return float(loss.sum() + PRIOR * (a - 1 - np.log(a)) + b**2 / 2)

    bounds = ((1e-3, None), (None, None))
    best = minimize(cost, (1.0, 0.0), method="L-BFGS-B", bounds=bounds)
    # the fit has logits rounded to bins, a hundredth wide
    assert cost(np.array([scale[label], bias[label]])) <= best.fun + 1e-2


def calibration_error(p: np.ndarray, y: np.ndarray) -> float:
    """Return the expected calibration error over 15 bins, from the probability of each image."""
    bins = np.minimum((p * 15).astype(int), 14)
    gaps = [abs((p - y)[bins == b].sum()) for b in range(15)]
    return sum(gaps) / len(p)


def test_the_calibration_error_of_each_label_is_that_of_its_images():
    logits, labels = drawn(1000)
    calibration = fit_multilabel_calibration(*drawn(2000, seed=1), None)
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
    counts = histogram(logits, labels)
    unfitted = label_calibration_errors(counts, MultilabelCalibration.unfitted(4))
    assert "error_before_scaling" not in unfitted
    assert unfitted["error"] == errors["error_before_scaling"]


def test_the_error_by_chance_is_that_of_true_probabilities():
    num = 300
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(num, 3)) * [1, 2, 1] - [0, 0, 4]
    errors = []
    for _ in range(200):
        labels = rng.random(logits.shape) < expit(logits)
        counts = histogram(torch.from_numpy(logits), torch.from_numpy(labels))
        found = label_calibration_errors(counts, MultilabelCalibration.unfitted(3))
        errors.append(found["error"])
    # it depends on the logits alone, and is approximate for few images in a bin
    np.testing.assert_allclose(found["error_by_chance"], np.mean(errors, axis=0), rtol=0.2)


def of_classes(num: int, seed: int) -> tuple[Tensor, Tensor]:
    logits, labels = drawn(num, seed)
    return logits[:, :2], labels[:, 0].long()


KINDS = {
    "single": (["a", "b"], of_classes, Aim("recall", 0.9, 1)),
    "several": (["a", "b", "c", "d"], drawn, LabelAim("recall", 0.9)),
}


def keep_the_images_of_the_last_validation(monkeypatch):
    monkeypatch.setattr(Metric, "reset", lambda _: None)


@promise("exact-metrics", controls=[keep_the_images_of_the_last_validation])
@given(
    kind=st.sampled_from(sorted(KINDS)),
    seed=SEEDS,
    cuts=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    has_aim=st.booleans(),
)
def test_batches_and_their_order_do_not_change_a_calibration(kind, seed, cuts, has_aim):
    names, draw, aim = KINDS[kind]
    logits, labels = draw(60, seed)
    task = task_for(kind, names)
    wanted = aim if has_aim else None
    calibrator = task.calibrator()
    calibrator.aim = wanted
    order = torch.randperm(60, generator=torch.Generator().manual_seed(seed % 2**32))
    low, high = sorted(cuts)
    found = []
    for rows in (torch.arange(60), order):  # the second validation begins anew
        for part in (rows[:low], rows[low:high], rows[high:]):
            if len(part):
                calibrator.update(logits[part], labels[part])
        found.append(calibrator.take())
    expected = task.fit_calibration(logits, labels, wanted)
    if kind == "several":
        assert found == [expected, expected]  # bit for bit
        return
    for one in found:
        assert one.temperature == pytest.approx(expected.temperature, rel=1e-12)
        assert (one.num_images, one.aim) == (60, wanted)
        assert (one.choice is None) == (not has_aim)
        if has_aim:
            assert one.choice == pytest.approx(expected.choice, rel=1e-9, nan_ok=True)


@given(p=st.lists(st.floats(0, 1), min_size=1), least=st.floats(0, 1), positive=st.integers(0, 1))
def test_a_threshold_decides_instead_of_the_more_probable_class(p, least, positive):
    probabilities = torch.tensor([[each, 1 - each] for each in p], dtype=torch.float64)
    calibration = Calibration(1.0, 9, Aim("f1", None, positive), Choice(least, 1.0))
    reaches = (probabilities[:, positive] >= least).tolist()
    decided = calibration.decide(probabilities).tolist()
    assert decided == [positive if reached else 1 - positive for reached in reaches]
    assert Calibration().decide(probabilities).equal(probabilities.argmax(dim=1))


def checkpoint_with(kind: str, value: object) -> dict[str, Any]:
    settings = {"class_names": KINDS[kind][0], "label_kind": kind}
    return {"finetune": {"calibration": value}, "hyper_parameters": settings}


WRITTEN = {
    "single": [
        Calibration(),
        Calibration(1.5, 16),
        Calibration(1.5, 16, Aim("recall", 0.99, 1), Choice(0.25, 1.0)),
        Calibration(1.5, 16, Aim("precision", 0.99, 0), Choice(None, 0.5)),
        Calibration(1.5, 16, Aim("accuracy", None, 0), Choice(None, None)),
    ],
    "several": [
        MultilabelCalibration.unfitted(4),
        fit_multilabel_calibration(*drawn(300), None),
        fit_multilabel_calibration(*drawn(300), LabelAim("recall", 0.9)),
        fit_multilabel_calibration(*drawn(300), LabelAim("accuracy")),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_keeps_its_calibration(kind):
    for written in WRITTEN[kind]:
        plain = written.as_plain()
        assert json.loads(json.dumps(plain)) == plain  # plain values
        assert read_calibration(checkpoint_with(kind, plain)) == written


NUMBERS = [math.nan, math.inf, -1.0, 1e300, True, 1, "1.0", None, [1.0] * 10_000, torch.ones(())]
COUNTS = [0, -1, 1.0, "1", None, True, 2**70]
# what no fit writes, by the place of the value
DAMAGED = {
    "single": {
        (): [[], "T", 1.5, {}, {"temperature": 1.0}],
        ("temperature",): [0.0, 1e-300, *NUMBERS],
        ("num_pictures",): COUNTS,
        ("threshold",): [[], 1.0, {}],
        ("threshold", "measure"): ["f1", "f2", None, [], {"a": 1}],
        ("threshold", "least"): [None, 2.0, "0.9", math.nan],
        ("threshold", "positive"): [2, -1, True, None, 0.0],
        ("threshold", "value"): [1.5, -0.1, math.nan, "0.5"],
        ("threshold", "reached"): [None, 1.5, math.nan],
    },
    "several": {
        (): [[], 1.5, {}],
        ("scale",): [[1.0] * 3, [0.0] * 4, 1.0, *([each] * 4 for each in NUMBERS)],
        ("bias",): [[math.nan] * 4, 0.0, [17.0] * 4],
        ("thresholds",): [[1.5] * 4, [-0.1] * 4, None],
        ("num_pictures",): COUNTS,
        ("aim", "measure"): ["luck", "f1", None],
        ("aim", "least"): [None, 2.0, math.nan],
        ("unreached",): [[4], [-1], [True], [0] * 5, 0],
        ("more",): [1],
    },
}


@pytest.mark.parametrize(
    ("kind", "place"), [(kind, place) for kind in DAMAGED for place in DAMAGED[kind]]
)
def test_a_calibration_that_no_fit_writes_is_refused_in_a_short_line(kind, place):
    for value in DAMAGED[kind][place]:
        plain: Any = WRITTEN[kind][2].as_plain()
        inside = plain
        for name in place[:-1]:
            inside = inside[name]
        if place:
            inside[place[-1]] = value
        else:
            plain = value
        with pytest.raises(ValueError, match="the checkpoint is not") as caught:
            read_calibration(checkpoint_with(kind, plain))
        assert len(str(caught.value)) < 200


def test_a_threshold_among_three_classes_is_refused():
    checkpoint = checkpoint_with("single", WRITTEN["single"][2].as_plain())
    checkpoint["hyper_parameters"]["class_names"] = ["a", "b", "c"]
    with pytest.raises(ValueError, match="two classes"):
        read_calibration(checkpoint)
