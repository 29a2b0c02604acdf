"""The number of batches and images within a limit of the Trainer. This module does not import torch."""

import math


def num_within(limit: float | None, num_images: int, batch_size: int) -> int:
    """Return the number of images within a limit: a number of batches (int), or a share (float), rounded down."""
    return min(num_images, batches_within(limit, math.ceil(num_images / batch_size)) * batch_size)


def batches_within(limit: float | None, num_batches: int) -> int:
    """Return the number of batches of an epoch within a limit."""
    if limit is None:
        return num_batches
    return min(num_batches, limit) if isinstance(limit, int) else int(num_batches * limit)
