"""How many batches and images a limit of the Trainer leaves: arithmetic alone, without torch."""

import math


def num_within(limit: float | None, num_images: int, batch_size: int) -> int:
    """Return how many images a limit leaves: a number of batches (int), or a share of them (float) in whole ones."""
    return min(num_images, batches_within(limit, math.ceil(num_images / batch_size)) * batch_size)


def batches_within(limit: float | None, num_batches: int) -> int:
    """Return how many batches of an epoch a limit leaves."""
    if limit is None:
        return num_batches
    return min(num_batches, limit) if isinstance(limit, int) else int(num_batches * limit)
