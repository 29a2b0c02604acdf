"""The fitted temperature, compared with SciPy's on the same logits, complete and merged from uneven parts."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from metric_parts import put_together
from scipy.optimize import minimize_scalar

from finetune.training.temperature import HIGHEST, LOWEST, PRIOR, Temperature, derivatives


def overconfident(
    num: int, num_classes: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits multiplied by the temperature that calibrates them; the labels are drawn from the original ones."""
    generator = torch.Generator().manual_seed(num * num_classes)
    logits = 2 * torch.randn(num, num_classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(dim=1), 1, generator=generator).squeeze(1)
    return logits * temperature, labels


def fitted(logits: torch.Tensor, labels: torch.Tensor) -> float:
    metric = Temperature()
    metric.update(logits, labels)
    return metric.compute().item()


@pytest.mark.parametrize("temperature", [0.2, 0.7, 1.0, 2.5, 6.0])
@pytest.mark.parametrize(("num", "num_classes"), [(5, 2), (160, 2), (800, 5), (300, 100)])
def test_it_is_the_minimum_that_scipy_finds(num, num_classes, temperature):
    logits, labels = overconfident(num, num_classes, temperature)

    def loss(log_inverse: float) -> float:
        b = math.exp(log_inverse)
        return F.cross_entropy(b * logits, labels, reduction="sum").item() + PRIOR * (
            b - 1 - log_inverse
        )

    reference = minimize_scalar(loss, bounds=(-2.7, 2.7), method="bounded", options={"xatol": 1e-9})
    # Between its nodes, an eighth apart, the slope is taken for a cubic: 2e-5 is the most that was seen.
    assert fitted(logits, labels) == pytest.approx(math.exp(-reference.x), rel=1e-4)


def test_many_images_give_the_temperature_back():
    # 40,000 images know it to about 0.01: the slope's standard error over the curvature.
    assert fitted(*overconfident(40_000, 3, 2.5)) == pytest.approx(2.5, abs=0.05)
    assert fitted(*overconfident(40_000, 3, 0.5)) == pytest.approx(0.5, abs=0.01)


def test_few_images_move_the_temperature_less_than_many_of_the_same_kind():
    # a third is wrong: T is 4 / log 2
    logits, labels = torch.tensor([[4.0, 0.0]]), torch.tensor([0, 0, 1])
    found = [fitted(logits.repeat(3 * num, 1), labels.repeat(num)) for num in (1, 2, 4, 16, 4096)]
    assert found == sorted(found) and 1 < found[0] < 2  # with a prior of one image 2.7
    assert found[-1] == pytest.approx(4 / math.log(2), rel=5e-3)


def test_derivatives_are_those_of_autograd():
    logits, labels = overconfident(50, 4, 1.5)
    inverse = torch.tensor([0.1, 1.0, 7.0], dtype=torch.float64, requires_grad=True)
    loss = sum(F.cross_entropy(b * logits, labels, reduction="sum") for b in inverse)
    (slope,) = torch.autograd.grad(loss, inverse, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), inverse)
    found = derivatives(logits, labels, inverse.detach())
    np.testing.assert_allclose(found[0], slope.detach(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found[1], curvature, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "sizes", [[300], [299, 1], [0, 300], [100, 100, 100], [1, 0, 299], [25] * 12]
)
def test_uneven_parts_put_together_give_the_complete(sizes):
    logits, labels = overconfident(300, 5, 3.0)
    parts = list(zip(logits.split(sizes), labels.split(sizes), strict=True))
    assert put_together(Temperature, parts).item() == pytest.approx(
        fitted(logits, labels), rel=1e-12
    )


def test_control_a_mean_of_the_parts_own_temperatures_is_something_else():
    logits, labels = overconfident(300, 5, 3.0)
    own = [fitted(logits[s], labels[s]) for s in (slice(0, 150), slice(150, 300))]
    assert abs(np.mean(own) - fitted(logits, labels)) > 1e-3


def test_big_batches_are_taken_in_pieces(monkeypatch):
    logits, labels = overconfident(300, 5, 3.0)
    full = fitted(logits, labels)
    monkeypatch.setattr("finetune.training.temperature._CHUNK", 7 * 49 * 5)
    assert fitted(logits, labels) == pytest.approx(full, rel=1e-12)


@pytest.mark.parametrize("num", [1, 2, 200])
@pytest.mark.parametrize("margin", [0.1, 1.0, 30.0])
def test_a_split_that_is_all_right_stays_unsure_as_the_rule_of_succession_has_it(num, margin):
    labels = torch.zeros(num, dtype=torch.int64)
    logits = torch.tensor([[margin, 0.0]]).repeat(num, 1)
    temperature = fitted(logits, labels)
    assert LOWEST <= temperature <= HIGHEST
    wrong = torch.sigmoid(torch.tensor(-margin / temperature, dtype=torch.float64)).item()
    # where the slope vanishes: wrong * margin * num = PRIOR * (1 - temperature)
    if LOWEST < temperature < HIGHEST:
        assert wrong * margin * num == pytest.approx(PRIOR * (1 - temperature), rel=1e-3)


def test_a_split_that_is_all_wrong_is_bounded():
    labels = torch.ones(200, dtype=torch.int64)
    assert fitted(torch.tensor([[30.0, 0.0]]).repeat(200, 1), labels) == HIGHEST
    # the prior holds against it
    assert fitted(torch.tensor([[0.01, 0.0]]).repeat(200, 1), labels) < HIGHEST


def test_one_class_alone_has_no_temperature_to_fit():
    assert fitted(torch.randn(20, 1), torch.zeros(20, dtype=torch.int64)) == pytest.approx(
        1.0, abs=1e-6
    )


def test_half_precision_and_what_overflowed_in_it():
    logits, labels = overconfident(100, 3, 2.0)
    assert fitted(logits.half(), labels) == pytest.approx(fitted(logits, labels), rel=1e-3)
    rows = torch.arange(100)
    logits[rows, (labels + 1) % 3] = -torch.inf  # a class that is ruled out, and rightly so
    ruled_out = fitted(logits, labels)
    logits[rows, (labels + 1) % 3] = -1e4
    assert ruled_out == pytest.approx(fitted(logits, labels), rel=1e-12)
    logits[0, labels[0]] = torch.inf
    assert math.isnan(fitted(logits, labels))
