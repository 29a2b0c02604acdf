"""`--minutes`: the longest training within a time is never longer than the time, and hardly shorter."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from finetune.fitting.time_budget import TrainingLength, longest_training


def longest(
    seconds: float, batch: float, between: float, num_images: int, batch_size: int, most: int
) -> TrainingLength:
    return longest_training(
        seconds,
        batch=batch,
        between=between,
        num_images=num_images,
        batch_size=batch_size,
        most=most,
    )


@given(
    seconds=st.floats(30, 1000),
    batch=st.floats(0.01, 0.3),
    between=st.floats(0.1, 2),
    num_images=st.integers(2, 20_000),
    batch_size=st.integers(2, 64),
)
@example(seconds=199, batch=1.0, between=0.0, num_images=3200, batch_size=32)
@example(seconds=30, batch=0.3, between=2.0, num_images=3, batch_size=32)
def test_training_uses_nine_tenths_of_its_time_and_no_more(
    seconds, batch, between, num_images, batch_size
):
    found = longest(seconds, batch, between, num_images, batch_size, most=10**9)
    full = math.ceil(num_images / batch_size)
    batches = found.batches or full
    # a smaller last batch takes as long as it has images
    filled = batches if batches < full else max(1.0, num_images / batch_size)
    assert found.epochs * (filled * batch + between) == pytest.approx(found.seconds)
    assert found.seen == found.epochs * min(num_images, batches * batch_size)
    assert batches <= full and found.seconds <= seconds * (1 + 1e-12)
    # nine complete epochs of nearly ten, or fewer, of which each is cut by less than a batch
    assert found.seconds >= min(0.9 * seconds, seconds - found.epochs * batch) * (1 - 1e-12)


@given(seconds=st.floats(-3, 1.49))
def test_without_time_for_a_batch_there_is_one(seconds):
    assert longest(seconds, 1.0, 0.5, 100, 32, 100) == TrainingLength(1, 1, 32, 1.5)
