"""The learning rate over the steps of a run."""

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytorch_lightning as pl
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from finetune import lightning_private
from finetune.system.messages import WrongUsage
from finetune.training.run_limits import total_steps

# Attribute of an optimizer: the scheduler's steps in the complete run. It is not in the optimizer's state.
_RUN_STEPS = "finetune_run_steps"


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


def run_steps(trainer: pl.Trainer, interval: str) -> int:
    """Return a scheduler's steps in the complete run: optimizer steps or, with the interval `epoch`, epochs."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    if data is not None:
        return total_steps(trainer, data.num_batches, interval)
    # This creates the training loader. With another data module than ours that is safe.
    steps = trainer.estimated_stepping_batches
    if interval == "epoch":
        steps = -1 if trainer.max_epochs is None else trainer.max_epochs
    if not 0 < steps < math.inf:
        raise ValueError(
            "the scheduler needs total_steps in a run without trainer.max_epochs and max_steps"
        )
    return int(steps)


def scheduler_config(
    make: Callable[..., LRScheduler],
    optimizer: Optimizer,
    trainer: pl.Trainer,
    shares: Sequence[float],
    interval: str,
) -> dict[str, Any]:
    """Create a scheduler, and return it with the settings by which Lightning steps it.

    Args:
        make: Creates the scheduler from an optimizer.
        optimizer: The learning rates of its groups are the full rates.
        trainer: Its limits end the run.
        shares: The multiplier of each group, from `scale_learning_rates`.
        interval: `step` or `epoch`.
    """
    steps = run_steps(trainer, interval)
    # The default of `Classifier` is a lambda without an argument for the steps, so they are an attribute.
    setattr(optimizer, _RUN_STEPS, steps)
    return lightning_config(
        at_each_rate(with_total_steps(make, steps), shares)(optimizer), interval
    )


def with_total_steps(
    make: Callable[..., LRScheduler], total_steps: int
) -> Callable[..., LRScheduler]:
    """Add `total_steps` to the arguments of a scheduler that takes it, unless the user has set the length."""
    make = make if isinstance(make, partial) else partial(make)
    # jsonargparse's partial calls a generic function that has the class among its arguments.
    scheduler_class = next(
        (argument for argument in make.args if isinstance(argument, type)), make.func
    )
    takes_steps = "total_steps" in inspect.signature(scheduler_class).parameters
    is_set = any(make.keywords.get(name) is not None for name in ("total_steps", "epochs"))
    return partial(make, total_steps=total_steps) if takes_steps and not is_set else make


def at_each_rate(
    make: Callable[..., LRScheduler], shares: Sequence[float]
) -> Callable[..., LRScheduler]:
    """Scale learning rates in a scheduler's arguments (OneCycleLR, CyclicLR) by the multiplier of each group."""
    keywords = make.keywords if isinstance(make, partial) else {}
    rates = {
        name: keywords[name]
        for name in ("max_lr", "base_lr")
        if isinstance(keywords.get(name), float | int)
    }
    if not rates:
        return make
    scaled = {name: [rate * share for share in shares] for name, rate in rates.items()}
    return partial(make, **scaled)


def lightning_config(scheduler: LRScheduler, interval: str) -> dict[str, Any]:
    """Return Lightning's settings for a scheduler. `StepOnPlateau` steps ReduceLROnPlateau instead of Lightning."""
    if isinstance(scheduler, ReduceLROnPlateau):
        return {
            "scheduler": scheduler,
            "interval": "epoch",
            "monitor": "val/loss",
            "frequency": sys.maxsize,
        }
    return {"scheduler": scheduler, "interval": interval}


class StepOnPlateau(pl.Callback):
    """Steps ReduceLROnPlateau with the latest val/loss, once per epoch with a validation.

    It does so after the validation at the end of an epoch. If there is none, it does so at the end of the epoch. In
    both cases that is before checkpoints are written. Lightning steps it after that, so a resumed run would have
    another rate. In an epoch that is resumed Lightning does not step it at all.
    """

    def __init__(self) -> None:
        # val/loss of a validation within the epoch. It is saved, since a resumed process would not have it.
        self._due: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"due": self._due}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._due = state_dict.get("due")  # earlier versions did not save the loss

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
            return
        splits = getattr(trainer.datamodule, "splits", ("val",))  # type: ignore[attr-defined]
        if "val" not in splits or not trainer.limit_val_batches:
            raise ValueError(
                "ReduceLROnPlateau watches val/loss, and nothing is validated: see --data.val_fraction"
            )

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self._due = float(trainer.callback_metrics["val/loss"])
        if lightning_private.is_epoch_trained(trainer):
            self._step(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step(trainer)

    def _step(self, trainer: pl.Trainer) -> None:
        loss = self._due
        self._due = None
        if loss is None:
            return
        for config in trainer.lr_scheduler_configs:
            if config.reduce_on_plateau:
                config.scheduler.step(loss)  # type: ignore[arg-type]
