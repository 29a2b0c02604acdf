"""The learning rate over the steps of a run."""

import math
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from finetune.data.batch_limits import batches_within
from finetune.system.messages import WrongUsage

# Attribute of an optimizer: the scheduler's steps in the complete run. It is not in the optimizer's state.
_RUN_STEPS = "finetune_run_steps"
# Schedulers that set rates without regard to those of the parameter groups, or wait for a metric.
UNSUPPORTED = ("CyclicLR", "OneCycleLR", "ReduceLROnPlateau")


class WarmupCosine(LambdaLR):
    """Linear warm-up to the full learning rate, then cosine decay. To be stepped after every optimizer step.

    For step t of T, counted from 0, with W warm-up steps, the full rate is multiplied by (t + 1) / W while t < W, and
    then by final + (1 - final) * (1 + cos(pi * (t - W) / (T - W))) / 2. No step has a rate of 0: the first one has
    1 / W of the full rate, and `final` would be reached only after the last one. Each group has its own full rate.

    The state has the current step and the full rates. All else comes from the arguments, on resume too.

    Args:
        optimizer: The learning rates of its groups are the full rates.
        total_steps: Optimizer steps of the complete run. In a fit it defaults to those of the fit.
        warmup: Share of the steps in which the rate rises, in [0, 1).
        final: Learning rate at the end, as a share of the full rate, in [0, 1].

    Source: linear warm-up, arXiv:1706.02677 section 2.2; cosine, SGDR without restarts, arXiv:1608.03983 equation 5.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int | None = None,
        warmup: float = 0.1,
        final: float = 0.0,
    ) -> None:
        if total_steps is None:
            total_steps = getattr(optimizer, _RUN_STEPS, None)
        if total_steps is None or total_steps < 1:
            raise WrongUsage(f"total_steps must be at least 1, not {total_steps}")
        if not 0 <= warmup < 1:
            raise WrongUsage(f"warmup must be at least 0 and below 1, not {warmup}")
        if not 0 <= final <= 1:
            raise WrongUsage(f"final must be from 0 to 1, not {final}")
        warmup_steps = min(round(warmup * total_steps), total_steps - 1)

        def factor(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / warmup_steps
            progress = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
            return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2

        # LambdaLR keeps plain functions out of its state, so that checkpoints load with `weights_only=True`.
        super().__init__(optimizer, factor)


def scheduler_config(
    make: Callable[..., LRScheduler],
    optimizer: Optimizer,
    trainer: pl.Trainer,
    interval: str,
) -> dict[str, Any]:
    """Create a scheduler, and return it with the settings by which Lightning steps it.

    Args:
        make: Creates the scheduler from an optimizer.
        optimizer: The learning rates of its groups are the full rates.
        trainer: Its limits end the run.
        interval: `step` or `epoch`.

    Raises:
        WrongUsage: Its arguments are wrong.
    """
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    set_run_steps(optimizer, total_steps(trainer, data.num_batches, interval))
    return {"scheduler": make(optimizer), "interval": interval}


def set_run_steps(optimizer: Optimizer, steps: int) -> None:
    """Set the default of `total_steps` of a `WarmupCosine` that is created from an optimizer."""
    setattr(optimizer, _RUN_STEPS, steps)


def total_steps(trainer: pl.Trainer, num_batches: int, interval: str = "step") -> int:
    """Return the optimizer steps of the complete run, including those before a resume; or its epochs, rounded up.

    Lightning's `estimated_stepping_batches` would create the training loader before the position of a resumed run is
    known.

    Args:
        trainer: Its limits end the run.
        num_batches: Global batches of an epoch, without limits.
        interval: `step` to count steps, `epoch` to count epochs.

    Raises:
        ValueError: The run has no limit.
    """
    batches = batches_within(trainer.limit_train_batches, num_batches)
    steps_each = max(1, math.ceil(batches / trainer.accumulate_grad_batches))
    limits = [] if trainer.max_steps < 0 else [trainer.max_steps]
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        limits.append(trainer.max_epochs * steps_each)
    if not limits:
        hint = "pass one, or a scheduler that needs no length, or --model.scheduler null"
        raise ValueError(
            f"the scheduler needs total_steps in a run without trainer.max_epochs and max_steps: {hint}"
        )
    return min(limits) if interval == "step" else math.ceil(min(limits) / steps_each)
