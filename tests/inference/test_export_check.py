"""The verification of an export finds differences from the network."""

import numpy as np
import pytest

from finetune.inference import export_check
from finetune.inference.export_check import MAX_DIFFERENCE, compare_prepared

pytestmark = pytest.mark.slow


@pytest.fixture
def images() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (9, 4, 4, 3), np.uint8).repeat(8, 1).repeat(8, 2)


def test_the_network_agrees_with_itself(predictor, images):
    found = compare_prepared(predictor, predictor.classify, images)
    assert found.is_good and found.num_images == 9 and found.num_other == 0
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


@pytest.mark.parametrize(
    "wrong", [upside_down, without_temperature, another_first, of_one_alone, no_numbers]
)
def test_what_is_wrong_is_seen(predictor, images, wrong):
    found = compare_prepared(predictor, wrong(predictor), images)
    assert not found.is_good and found.largest > MAX_DIFFERENCE


def test_another_class_alone_is_enough_but_in_a_tie(predictor, images, monkeypatch):
    p = predictor.classify(images)
    for moved, num in ((2e-6, 9), (1e-7, 0)):
        # no two say the same
        monkeypatch.setattr(predictor, "decide", lambda p: (p[:, 0] * 1e9).astype(int))
        found = compare_prepared(
            predictor, lambda images, moved=moved: p[: len(images)] + moved, images
        )
        assert (
            found.num_other == num
            and found.largest < MAX_DIFFERENCE
            and found.is_good == (num == 0)
        )


def test_a_first_call_after_the_other_is_not_counted(monkeypatch):
    clock, last = [0.0], [""]

    def run_of(name: str):
        def run(images):
            clock[0] += 1.0 if last[0] == name else 5.0  # seconds
            last[0] = name

        return run

    monkeypatch.setattr(export_check.time, "perf_counter", lambda: clock[0])
    assert export_check.time_in_turns(
        run_of("a"), run_of("b"), np.zeros((2, 4, 4, 3), np.uint8)
    ) == (
        1000,
        1000,
    )
