"""How many steps of a fit there is time for, where somebody says how many minutes it may take."""

import math
from typing import NamedTuple

_LEAST = 9  # epochs from which on whole ones use up a budget to a tenth; fewer are cut to fit


class Plan(NamedTuple):
    """The length of a fit.

    Attributes:
        epochs: How many.
        batches: Steps' worth of batches in each; None for all there are.
        seen: Pictures of all epochs.
        seconds: Of all epochs, as they should take.
    """

    epochs: int
    batches: int | None
    seen: int
    seconds: float


def plan(
    seconds: float,
    *,
    batch: float,
    between: float,
    num_images: int,
    batch_size: int,
    most: int,
) -> Plan | None:
    """Return the longest fit that `seconds` hold; None where that is not even a batch.

    Few epochs are made shorter, not fewer: each then has the first batches of an order of its own, so that no picture
    is left out for long.

    Args:
        seconds: For training and validation.
        batch: Seconds of a whole batch; the last of an epoch takes as much of them as it is of one.
        between: Seconds between epochs: validation, and a checkpoint.
        num_images: In the training split.
        batch_size: Of a batch over all devices.
        most: Epochs at most.
    """
    whole, filled = math.ceil(num_images / batch_size), max(1.0, num_images / batch_size)
    fitting = seconds / (filled * batch + between)
    epochs = min(most, math.floor(fitting) if fitting >= _LEAST else math.ceil(fitting))
    batches = _fitting(seconds / epochs - between, batch, whole, filled) if epochs > 0 else 0
    while epochs > 1 and batches < 1:  # what is between epochs takes more than they do
        epochs -= 1
        batches = _fitting(seconds / epochs - between, batch, whole, filled)
    if batches < 1:
        return None
    seen = epochs * min(num_images, batches * batch_size)
    each = min(filled, batches) * batch + between
    return Plan(epochs, batches if batches < whole else None, seen, epochs * each)


def _fitting(seconds: float, batch: float, whole: int, filled: float) -> int:
    """Return how many batches of an epoch there is time for."""
    return whole if seconds >= filled * batch else min(whole - 1, math.floor(seconds / batch))
