"""The number of batches, optimizer steps and epochs of a fit under the limits of its Trainer."""

import math
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import GradientAccumulationScheduler

from finetune.data.batch_limits import FitLimits, batches_within


def fit_limits(trainer: pl.Trainer) -> FitLimits:
    """Return the limits of a Trainer that end a fit."""
    return FitLimits(
        max_epochs=trainer.max_epochs,
        max_steps=trainer.max_steps,
        batches_per_step=most_accumulated(trainer),
        limit_train_batches=trainer.limit_train_batches,
    )


def total_steps(trainer: pl.Trainer, num_batches: int, interval: str = "step") -> int:
    """Return the optimizer steps of the complete run, including those before a resume; or its epochs, rounded up.

    Lightning's `estimated_stepping_batches` would create the training loader before the position of a resumed run is
    known.

    Args:
        trainer: Its limits end the run.
        num_batches: Global batches of an epoch, without limits.
        interval: `step` to count steps, `epoch` to count epochs.

    Raises:
        ValueError: The run has no limit, or a limit of 0.
    """
    batches = batches_within(trainer.limit_train_batches, num_batches)
    if batches == 0:
        raise ValueError(
            f"nothing to train: trainer.limit_train_batches is {trainer.limit_train_batches}"
        )
    max_epochs = -1 if trainer.max_epochs is None else trainer.max_epochs
    if trainer.max_steps < 0 and max_epochs < 0:
        hint = "pass one, or a scheduler that needs no length, or --model.scheduler null"
        raise ValueError(
            f"the scheduler needs total_steps in a run without trainer.max_epochs and max_steps: {hint}"
        )

    def steps_of(epochs: range) -> int:
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
        return steps_in(trainer.accumulate_grad_batches, callbacks, batches, epochs)

    steps = trainer.max_steps
    if max_epochs >= 0:
        in_epochs = steps_of(range(max_epochs))
        steps = in_epochs if steps < 0 else min(steps, in_epochs)
    if steps == 0:
        raise ValueError(
            f"nothing to train: trainer.max_epochs is {max_epochs}, trainer.max_steps {trainer.max_steps}"
        )
    if interval == "step":
        return steps
    epochs = 0
    while steps > 0:
        steps -= steps_of(range(epochs, epochs + 1))
        epochs += 1
    return epochs


def steps_in(accumulated: int, callbacks: Any, num_batches: int, epochs: range) -> int:
    """Return the optimizer steps of some epochs.

    Args:
        accumulated: Batches per step (gradient accumulation), unless a callback changes it by epoch.
        callbacks: The callbacks of the Trainer: one, a list or None.
        num_batches: Batches of each epoch.
        epochs: Indices of the epochs, from 0.
    """
    scheduler = _accumulation_scheduler(callbacks)
    if scheduler is None:
        return math.ceil(num_batches / accumulated) * len(epochs)
    return sum(
        math.ceil(num_batches / scheduler.get_accumulate_grad_batches(epoch)) for epoch in epochs
    )


def most_accumulated(trainer: pl.Trainer) -> int:
    """Return the largest number of batches per step (gradient accumulation)."""
    scheduler = _accumulation_scheduler(getattr(trainer, "callbacks", None))
    if scheduler is None:
        return trainer.accumulate_grad_batches
    return max(scheduler.scheduling.values())


def _accumulation_scheduler(callbacks: Any) -> GradientAccumulationScheduler | None:
    listed = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    return next((c for c in listed if isinstance(c, GradientAccumulationScheduler)), None)
