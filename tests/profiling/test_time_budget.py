"""The length of a fit within a time budget: never longer than the budget, and hardly shorter."""

import itertools
import math

import pytest

from finetune.profiling.fit_length import TrainingLength, longest_training

COSTS = [0.01, 0.3]  # seconds of a batch
BETWEEN = [0.1, 2.0]
SIZES = [(3, 32), (300, 32), (20_000, 64)]


def longest(
    seconds: float, batch: float, between: float, num_images: int, batch_size: int, most: int
) -> TrainingLength | None:
    return longest_training(
        seconds,
        batch=batch,
        between=between,
        num_images=num_images,
        batch_size=batch_size,
        most=most,
    )


@pytest.mark.parametrize("seconds", [30, 100, 1000])
@pytest.mark.parametrize(("batch", "between", "size"), [*itertools.product(COSTS, BETWEEN, SIZES)])
def test_a_plan_keeps_to_its_time_and_uses_nine_tenths_of_it(seconds, batch, between, size):
    num_images, batch_size = size
    found = longest(seconds, batch, between, num_images, batch_size, most=10**9)
    assert found is not None
    full = math.ceil(num_images / batch_size)
    batches = found.batches or full
    filled = batches if batches < full else max(1.0, num_images / batch_size)
    assert found.epochs * (filled * batch + between) == pytest.approx(found.seconds)
    assert found.seen == found.epochs * min(num_images, batches * batch_size)
    assert batches <= full and found.seconds <= seconds * (1 + 1e-12)
    # nine whole epochs of nearly ten, or epochs cut to a batch
    assert found.seconds >= 0.9 * seconds - batch


def test_epochs_are_cut_where_they_are_few_and_whole_where_they_are_many():
    assert longest(250, 1.0, 0.0, 3200, 32, 100) == (3, 83, 3 * 83 * 32, 249.0)
    assert longest(50, 1.0, 0.0, 3200, 32, 100) == (1, 50, 50 * 32, 50.0)
    assert longest(1050, 1.0, 0.0, 3200, 32, 100) == (10, None, 32_000, 1000.0)
    assert longest(10_000, 1.0, 0.0, 3200, 32, 7) == (7, None, 7 * 3200, 700.0)


def test_the_last_batch_takes_as_long_as_it_has_images():
    # Nine batches of 32, and one of 10: 9.3 s an epoch, of which there is time for 20, not for 19.
    assert longest(187, 1.0, 0.0, 298, 32, 100) == (20, None, 20 * 298, pytest.approx(186.25))
    assert longest(9.3125, 1.0, 0.0, 298, 32, 100).batches is None
    assert longest(9.31, 1.0, 0.0, 298, 32, 100).batches == 9
    assert longest(20.0, 1.0, 0.0, 10, 32, 100).epochs == 20  # a batch of 10 was tried then


def test_control_whole_epochs_alone_would_leave_half_of_the_time_unused():
    assert math.floor(199 / 100) * 100 < 0.6 * 199 < longest(199, 1.0, 0.0, 3200, 32, 100).seconds


@pytest.mark.parametrize("num_images", [40, 2_000])
def test_more_time_never_means_fewer_images(num_images):
    seen = [
        found.seen for t in range(5, 400) if (found := longest(t, 0.3, 0.5, num_images, 32, 10**6))
    ]
    # Where one epoch more begins, its checkpoint takes the time of some batches, and so do those that are cut: the last
    # one of a complete epoch may take less time than there was for it.
    assert all(later >= earlier - (3 + 9) * 32 for earlier, later in itertools.pairwise(seen))
    assert seen[-1] > 10 * seen[0]


@pytest.mark.parametrize("seconds", [-3.0, 0.0, 0.5, 1.4])
def test_without_time_for_a_batch_there_is_no_plan(seconds):
    assert longest(seconds, 1.0, 0.5, 100, 32, 100) is None


def test_where_checkpoints_take_longer_than_epochs_there_are_fewer_of_them():
    assert longest(10.0, 1.0, 9.0, 32, 32, 100) == (1, None, 32, 10.0)
    assert longest(15.0, 1.0, 9.0, 32, 32, 100) == (1, None, 32, 10.0)
