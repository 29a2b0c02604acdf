"""The length of a fit under a time limit (`--minutes`)."""

import math
from typing import NamedTuple

# With at least so many complete epochs, at most a tenth of the time remains unused. Fewer epochs are shortened to fit.
_MIN_COMPLETE_EPOCHS = 9


class Plan(NamedTuple):
    """The length of a fit.

    Attributes:
        epochs: Number of epochs.
        batches: Number of batches in each epoch; None for all.
        seen: Samples of all epochs.
        seconds: Expected duration of all epochs.
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
    """Return the longest fit that takes at most `seconds`; None if there is no time for a single batch.

    If there is time for few epochs only, epochs are shortened. Each then has the first batches of its own random order,
    so that no image is skipped for long.

    Args:
        seconds: Time for training and validation.
        batch: Seconds of a full batch. A smaller batch takes proportionally less.
        between: Seconds between epochs, for validation and a checkpoint.
        num_images: Images in the training split.
        batch_size: The global batch size.
        most: The largest number of epochs.
    """
    whole, filled = math.ceil(num_images / batch_size), max(1.0, num_images / batch_size)
    fitting = seconds / (filled * batch + between)
    num_epochs = math.floor(fitting) if fitting >= _MIN_COMPLETE_EPOCHS else math.ceil(fitting)
    epochs = min(most, num_epochs)
    batches = _fitting(seconds / epochs - between, batch, whole, filled) if epochs > 0 else 0
    while epochs > 1 and batches < 1:  # validation and checkpoints take too long for so many epochs
        epochs -= 1
        batches = _fitting(seconds / epochs - between, batch, whole, filled)
    if batches < 1:
        return None
    seen = epochs * min(num_images, batches * batch_size)
    each = min(filled, batches) * batch + between
    return Plan(epochs, batches if batches < whole else None, seen, epochs * each)


def _fitting(seconds: float, batch: float, whole: int, filled: float) -> int:
    """Return the number of batches of an epoch that there is time for."""
    return whole if seconds >= filled * batch else min(whole - 1, math.floor(seconds / batch))
