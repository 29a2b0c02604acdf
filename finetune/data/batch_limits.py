"""The number of batches and images within the limits of the Trainer. This module does not import torch."""

import math
from dataclasses import dataclass
from typing import Any


def num_within(limit: float | None, num_images: int, batch_size: int) -> int:
    """Return the number of images within a limit: a number of batches (int), or a share (float), rounded down."""
    return min(num_images, batches_within(limit, math.ceil(num_images / batch_size)) * batch_size)


def batches_within(limit: float | None, num_batches: int) -> int:
    """Return the number of batches of an epoch within a limit."""
    if limit is None:
        return num_batches
    return min(num_batches, limit) if isinstance(limit, int) else int(num_batches * limit)


def check_limit(limit: float, split: str, num_images: int, batch_size: int) -> None:
    """Check that a Trainer's limit, if it is a share of the batches, is at least one batch.

    Args:
        limit: A number of batches (int), or a share of them (float).
        split: Name of the split.
        num_images: Images in the split.
        batch_size: Images in a global batch.

    Raises:
        ValueError: The limit is less than one batch.
    """
    is_share = isinstance(limit, float) and limit > 0
    if is_share and num_images > 0 and num_within(limit, num_images, batch_size) == 0:
        raise ValueError(f"trainer.limit_{split}_batches {limit} is less than one batch of {split}")


@dataclass(frozen=True)
class FitLimits:
    """The Trainer's limits on the length of a fit.

    Attributes:
        max_epochs: Epochs of the complete run, including those before a resume; None or -1 for no limit.
        max_steps: Optimizer steps of the complete run; -1 for no limit.
        batches_per_step: Largest number of batches whose gradients one step accumulates.
        limit_train_batches: Batches per epoch: a number (int), or a share of them (float).
    """

    max_epochs: int | None
    max_steps: int = -1
    batches_per_step: int = 1
    limit_train_batches: int | float | None = 1.0

    @classmethod
    def of(cls, trainer: Any) -> "FitLimits":
        """Return the limits of a Trainer. Callbacks that change the number of accumulated batches are ignored."""
        return cls(
            max_epochs=trainer.max_epochs,
            max_steps=trainer.max_steps,
            batches_per_step=trainer.accumulate_grad_batches,
            limit_train_batches=trainer.limit_train_batches,
        )

    @property
    def num_epochs(self) -> float:
        """Epochs of the run; infinite without a limit."""
        return math.inf if self.max_epochs in (None, -1) else self.max_epochs

    def num_reads(self, num_images: int, batch_size: int) -> float:
        """Return the total number of training samples that the fit reads.

        Args:
            num_images: Images in the training split.
            batch_size: Images in a global batch.
        """
        reads = self.num_epochs * num_within(self.limit_train_batches, num_images, batch_size)
        if self.max_steps != -1:
            reads = min(reads, self.max_steps * self.batches_per_step * batch_size)
        return reads
