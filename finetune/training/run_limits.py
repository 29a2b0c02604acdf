"""The number of batches, optimizer steps and epochs of a fit under the limits of its Trainer."""

import math

import pytorch_lightning as pl

from finetune.data.batch_limits import FitLimits, batches_within


def fit_limits(trainer: pl.Trainer) -> FitLimits:
    """Return the limits of a Trainer that end a fit."""
    return FitLimits(
        max_epochs=trainer.max_epochs,
        max_steps=trainer.max_steps,
        batches_per_step=trainer.accumulate_grad_batches,
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

    steps_each = math.ceil(batches / trainer.accumulate_grad_batches)
    steps = trainer.max_steps
    if max_epochs >= 0:
        in_epochs = max_epochs * steps_each
        steps = in_epochs if steps < 0 else min(steps, in_epochs)
    if steps == 0:
        raise ValueError(
            f"nothing to train: trainer.max_epochs is {max_epochs}, trainer.max_steps {trainer.max_steps}"
        )
    if interval == "step":
        return steps
    return math.ceil(steps / steps_each)
