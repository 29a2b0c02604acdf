"""Probabilities of one label and of several labels, calibrated on validation images, and what a checkpoint keeps."""

import json
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize, minimize_scalar
from scipy.special import expit
from torch import Tensor

from finetune.training.calibration import (
    HIGHEST,
    LOWEST,
    PRIOR,
    Calibration,
    fit_scale,
    fit_scale_and_bias,
    read_calibration,
)
from finetune.training.measure import calibration_error
from finetune.training.threshold import Aim

SEEDS = st.integers(0, 2**32)


@st.composite
def validated(draw) -> tuple[Tensor, Tensor]:
    """Logits of a network that is too sure or not sure enough, and classes; or all is right, or all is wrong."""
    num_classes = draw(st.sampled_from([2, 5, 100]))
    num = draw(st.sampled_from([1, 5, 160, 500]))
    generator = torch.Generator().manual_seed(draw(SEEDS))
    logits = 2 * torch.randn(num, num_classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(dim=1), 1, generator=generator).squeeze(1)
    kind = draw(st.sampled_from(["drawn", "drawn", "right", "wrong"]))
    if kind != "drawn":
        labels = logits.argmax(dim=1) if kind == "right" else logits.argmin(dim=1)
    return logits * draw(st.sampled_from([0.01, 0.2, 0.7, 1.0, 2.5, 30.0])), labels


@given(images=validated())
def test_the_temperature_is_the_minimum_that_scipy_finds(images):
    logits, labels = images

    def loss(log_scale: float) -> float:
        b = math.exp(log_scale)
        prior = PRIOR * (b - 1 - log_scale)
        return F.cross_entropy(b * logits, labels, reduction="sum").item() + prior

    bounds = (math.log(LOWEST), math.log(HIGHEST))
    reference = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-9})
    # scipy compares losses, whose differences are rounded
    assert fit_scale(logits, labels) == pytest.approx(math.exp(reference.x), rel=1e-5)


def test_the_temperature_of_one_class_and_of_half_precision_and_of_what_overflowed():
    assert fit_scale(torch.randn(20, 1), torch.zeros(20).long()) == pytest.approx(1, abs=1e-6)
    logits = 4 * torch.randn(100, 3, generator=torch.Generator().manual_seed(0)).double()
    rows = torch.arange(100)
    labels = rows % 3
    plain = fit_scale(logits, labels)
    assert fit_scale(logits.half(), labels) == pytest.approx(plain, rel=1e-3)
    logits[rows, (labels + 1) % 3] = -torch.inf  # a class that is ruled out, and rightly so
    ruled_out = fit_scale(logits, labels)
    logits[rows, (labels + 1) % 3] = -1e4
    assert ruled_out == pytest.approx(fit_scale(logits, labels), rel=1e-12)
    logits[0, labels[0]] = torch.inf
    assert math.isnan(fit_scale(logits, labels))
    unfitted = Calibration.unfitted("single", 3)
    assert Calibration.fit(logits, labels, None) == unfitted and unfitted.as_plain() is None


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
    scale, bias = (float(each[label]) for each in fit_scale_and_bias(logits, labels))

    def cost(parameters: np.ndarray) -> float:
        a, b = parameters
        z = a * logits[:, label].numpy() + b
        loss = np.logaddexp(0, z) - labels[:, label].numpy() * z
        return float(loss.sum() + PRIOR * (a - 1 - np.log(a)) + b**2 / 2)

    bounds = ((1e-3, None), (None, None))
    best = minimize(cost, (1.0, 0.0), method="L-BFGS-B", bounds=bounds)
    # up to the bounds that the fit has besides
    at_bounds = best.x.clip((LOWEST, -16), (HIGHEST, 16))
    assert cost(np.array([scale, bias])) <= max(best.fun, cost(at_bounds)) * (1 + 1e-9)


def test_a_calibration_of_labels_lowers_the_errors_of_those_that_are_wrong():
    logits, labels = drawn(1000)
    y = labels.numpy() > 0
    errors = []
    for calibration in (
        Calibration.unfitted("several", 4),
        Calibration.fit(*drawn(2000, seed=1), None),
    ):
        p = calibration.probabilities(logits)
        errors.append([calibration_error(p[:, k].numpy(), y[:, k]) for k in range(4)])
    before, after = errors
    assert min(before[k] - after[k] for k in (1, 2)) > 0.02


def of_classes(num: int, seed: int) -> tuple[Tensor, Tensor]:
    logits, labels = drawn(num, seed)
    return logits[:, :2], labels[:, 0].long()


KINDS = {
    "single": (["a", "b"], of_classes, Aim("recall", 0.9, 1)),
    "several": (["a", "b", "c", "d"], drawn, Aim("recall", 0.9)),
}


@given(kind=st.sampled_from(sorted(KINDS)), seed=SEEDS, has_aim=st.booleans())
def test_the_order_of_images_does_not_change_a_calibration(kind, seed, has_aim):
    _, draw, aim = KINDS[kind]
    logits, labels = draw(60, seed)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(seed % 2**32))
    wanted = aim if has_aim else None
    one = Calibration.fit(logits, labels, wanted)
    other = Calibration.fit(logits[order], labels[order], wanted)
    assert (one.num_images, one.aim) == (other.num_images, other.aim) == (60, wanted)
    assert (one.reached, one.unreached) == (other.reached, other.unreached)
    for name in ("scale", "bias", "thresholds"):
        expected = pytest.approx(getattr(one, name), rel=1e-9, abs=1e-9)
        assert getattr(other, name) == expected


@given(p=st.lists(st.floats(0, 1), min_size=1), least=st.floats(0, 1), positive=st.integers(0, 1))
def test_a_threshold_decides_instead_of_the_more_probable_class(p, least, positive):
    probabilities = torch.tensor([[each, 1 - each] for each in p], dtype=torch.float64)
    calibration = Calibration("single", (1.0,), (0.0,), (least,), 9, Aim("f1", None, positive), 1.0)
    reaches = (probabilities[:, positive] >= least).tolist()
    decided = calibration.decide(probabilities).tolist()
    assert decided == [positive if reached else 1 - positive for reached in reaches]
    plain = Calibration.unfitted("single", 2)
    assert plain.decide(probabilities).equal(probabilities.argmax(dim=1))


def checkpoint_with(kind: str, value: object) -> dict[str, Any]:
    settings = {"class_names": KINDS[kind][0], "label_kind": kind}
    return {"finetune": {"calibration": value}, "hyper_parameters": settings}


def of_two(thresholds: tuple[float, ...], aim: Aim, reached: float | None) -> Calibration:
    return Calibration("single", (1.5,), (0.0,), thresholds, 16, aim, reached)


WRITTEN = {
    "single": [
        Calibration.unfitted("single", 2),
        Calibration("single", (1.5,), (0.0,), num_images=16),
        of_two((0.25,), Aim("recall", 0.99, 1), 1.0),
        of_two((), Aim("precision", 0.99, 0), 0.5),
        of_two((), Aim("accuracy", None, 0), None),
    ],
    "several": [
        Calibration.unfitted("several", 4),
        Calibration.fit(*drawn(300), None),
        Calibration.fit(*drawn(300), Aim("recall", 0.9)),
        Calibration.fit(*drawn(300), Aim("accuracy")),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_keeps_its_calibration(kind):
    for written in WRITTEN[kind]:
        plain = written.as_plain()
        assert json.loads(json.dumps(plain)) == plain  # plain values
        assert read_calibration(checkpoint_with(kind, plain)) == written


NUMBERS = [math.nan, math.inf, -1.0, 1e300, True, "1.0", None, [1.0] * 10_000, torch.ones(())]
COUNTS = [-1, 1.0, "1", None, True, 2**70]
# what no fit writes, by the place of the value
DAMAGED = {
    "single": {
        (): [[], "T", 1.5, {}, {"temperature": 1.0}],
        ("scale",): [[1.0] * 2, [], 1.0, [0.0], [1e-300], *([each] for each in NUMBERS)],
        ("bias",): [[], [0.0, 0.0]],
        ("num_images",): COUNTS,
        ("thresholds",): [[1.5], [-0.1], [math.nan], ["0.5"], 0.5, [0.5] * 2],
        ("aim",): [[], 1.0, {}, None],
        ("aim", "measure"): ["f2", None, [], {"a": 1}],
        ("aim", "least"): [2.0, "0.9", math.nan],
        ("aim", "positive"): [2, -1, True, None, 0.0],
        ("reached",): [None, 1.5, math.nan],
        ("unreached",): [[2], 0],
        ("scores",): [
            [[0.5] * 2001],
            [[0.5], [0.5]],
            [[1.5]],
            [[math.nan]],
            [["0.5"]],
            [0.5],
            None,
        ],
        ("coverage",): ["0.9"],
    },
    "several": {
        (): [[], 1.5, {}],
        ("scale",): [[1.0] * 3, [0.0] * 4, 1.0, *([each] * 4 for each in NUMBERS)],
        ("bias",): [[math.nan] * 4, 0.0, [17.0] * 4],
        ("thresholds",): [[1.5] * 4, [-0.1] * 4, None, []],
        ("num_images",): COUNTS,
        ("aim", "measure"): ["luck", None],
        ("aim", "least"): [2.0, math.nan],
        ("unreached",): [[4], [-1], [True], 0],
        ("scores",): [[[0.5] * 2001] * 4, [[0.5]] * 3, [[-0.1]] * 4, [0.5] * 4],
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


def test_more_scores_than_labels_are_refused_before_they_are_copied():
    plain = WRITTEN["single"][1].as_plain()
    plain["scores"] = [[0.5] * 2000] * 2000  # in a file as small as 4000 values
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="scores are not those"):
            read_calibration(checkpoint_with("single", plain))
        assert tracemalloc.get_traced_memory()[1] < 2**20  # bytes
    finally:
        tracemalloc.stop()


def test_a_threshold_among_three_classes_is_refused():
    checkpoint = checkpoint_with("single", WRITTEN["single"][2].as_plain())
    checkpoint["hyper_parameters"]["class_names"] = ["a", "b", "c"]
    with pytest.raises(ValueError, match="two classes"):
        read_calibration(checkpoint)
