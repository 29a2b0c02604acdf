"""The time of steps, separated from the time between epochs."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from finetune.profiling.stopwatch import _BETWEEN, _batch_and_between, _seconds_per_image


def measured(*epochs, between=0.5, of_one=0.1):
    """The measurement of epochs with batches of this many images, which all take equally long."""
    ends = []
    sizes = []
    is_first = []
    now = 0.0
    for epoch in epochs:
        now += between
        for i, size in enumerate(epoch):
            now += of_one * size
            ends.append(now)
            sizes.append(size)
            is_first.append(i == 0)
    return _batch_and_between(ends, sizes, is_first)


def test_a_batch_and_what_is_between_epochs():
    assert measured([8, 8, 8], [8, 8, 8]) == (pytest.approx(0.8), pytest.approx(0.5))
    assert measured([8, 8, 8, 3], [8, 8, 8, 3]) == (pytest.approx(0.8), pytest.approx(0.5))


def test_without_an_end_of_an_epoch_it_is_what_is_usual():
    assert measured([8, 8, 8, 8]) == (pytest.approx(0.8), _BETWEEN)


def test_where_a_complete_batch_follows_none_of_its_epoch_all_is_the_batches():
    """A small second batch does not predict the time of a full one: most of its time may be constant."""
    batch, between = measured([8, 1], [8, 1], [8, 1])
    assert between == 0.0
    # an epoch, seen from the end of a batch on
    assert 9 / 8 * batch == pytest.approx(0.5 + 0.8 + 0.1, rel=0.05)
    assert measured([8], [8], [8]) == (pytest.approx(0.5 + 0.8), 0.0)


def test_batches_of_bad_images_alone_take_their_time():
    assert measured([0, 0], [0, 0], between=0.5)[0] > 0


class Timed(torch.nn.Module):
    """Takes 0.1 s for each image of 10 pixels, in proportion; 0.001 s for the features of each."""

    device = torch.device("cpu")

    def __init__(self, advance):
        super().__init__()
        self.advance, self.seen = advance, []

    def forward(self, images):
        self.seen.append((self.training, images.dtype, *images.shape))
        self.advance(0.1 * (images.shape[-1] / 10) ** 2 * len(images))
        return images


@pytest.fixture
def evaluating(clock):
    trainer = SimpleNamespace(precision_plugin=SimpleNamespace(forward_context=nullcontext))
    model = Timed(clock)
    return model, lambda side: _seconds_per_image(model, trainer, 6, side)


@pytest.mark.slow
@pytest.mark.parametrize(("side", "seconds"), [(10, 0.1), (20, 0.4)])
def test_evaluation_is_timed_at_its_own_size_of_a_complete_batch(evaluating, side, seconds):
    model, timed = evaluating
    assert timed(side) == pytest.approx(seconds)
    assert set(model.seen) == {(False, torch.uint8, 6, 3, side, side)} and model.training
