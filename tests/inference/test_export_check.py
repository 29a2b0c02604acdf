"""What differs from the network is found."""

import numpy as np
import pytest

from finetune.inference.export_check import LARGEST, hold_against
from finetune.inference.predictor import Predictor


@pytest.fixture
def predictor(calibrated) -> Predictor:
    return Predictor(calibrated)


@pytest.fixture
def images() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (9, 4, 4, 3), np.uint8).repeat(8, 1).repeat(8, 2)


def test_the_network_agrees_with_itself(predictor, images):
    found = hold_against(predictor, predictor.classify, images)
    assert found.is_good and found.num_pictures == 9 and found.num_other == 0
    assert found.largest < 1e-6  # batches of other sizes add in another order
    assert all(milliseconds > 0 for milliseconds in found.milliseconds)


def upside_down(predictor):
    return lambda images: predictor.classify(np.ascontiguousarray(images[:, ::-1]))


def without_temperature(predictor):
    return lambda images: predictor.classify(images) ** 0.5


def another_first(predictor):
    return lambda images: np.roll(predictor.classify(images), 1, axis=1)


def of_one_alone(predictor):  # a batch that was taken for a constant
    return lambda images: predictor.classify(images[:1])


def no_numbers(predictor):
    return lambda images: np.full((len(images), 3), np.nan)


@pytest.mark.parametrize("wrong", [upside_down, without_temperature, another_first, of_one_alone, no_numbers])
def test_what_is_wrong_is_seen(predictor, images, wrong):
    found = hold_against(predictor, wrong(predictor), images)
    assert not found.is_good and found.largest > LARGEST


def test_another_class_alone_is_enough(predictor, images, monkeypatch):
    p, calls = predictor.classify(images), iter(range(9))
    monkeypatch.setattr(predictor, "decide", lambda p: np.full(len(p), next(calls)))
    assert hold_against(predictor, lambda images: p[: len(images)], images).num_other > 0
