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

# Attribute of an optimizer: the scheduler's steps in the whole run. It is not in the optimizer's state.
_RUN_STEPS = "finetune_run_steps"


class WarmupCosine(LambdaLR):
    """A linear rise to the full rate, then half a cosine down; to be stepped after every optimizer step.

    Step t of T, counted from 0, with W steps of warm-up, learns at the full rate times (t + 1) / W while t < W, then
    times final + (1 - final) * (1 + cos(pi * (t - W) / (T - W))) / 2. So no step is wasted on a rate of 0: the first
    has 1 / W of the rate, and `final` is reached after the last. Each group keeps its own full rate.

    The state holds the position and the groups' full rates; the shape comes from the arguments, also on resume.

    Args:
        optimizer: Its groups' learning rates are the full rates.
        total_steps: Optimizer steps of the whole run; in a fit, those of the fit.
        warmup: Share of the steps in which the rate rises, in [0, 1).
        final: Share of the rate at the end, in [0, 1].

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
    """Return a scheduler's steps in the whole run: optimizer steps or, with the interval `epoch`, epochs."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    if data is not None:
        return total_steps(trainer, data.num_batches, interval)
    # which makes the training loader: here not one of ours, that may wait
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
    """Make a scheduler, and say when Lightning is to step it.

    Args:
        make: Makes it.
        optimizer: Its groups' rates are the full ones.
        trainer: Its limits end the run.
        shares: Of the groups' rates in the one that the optimizer was given.
        interval: After which it is stepped, `step` or `epoch`.
    """
    steps = run_steps(trainer, interval)
    # The default of `Classifier` is a lambda, whose class jsonargparse reads from the source: it takes no steps.
    setattr(optimizer, _RUN_STEPS, steps)
    return as_lightning_wants(
        at_each_rate(with_total_steps(make, steps), shares)(optimizer), interval
    )


def with_total_steps(
    make: Callable[..., LRScheduler], total_steps: int
) -> Callable[..., LRScheduler]:
    """Give a scheduler that wants to know the run's number of steps, and was not told one, that number."""
    make = make if isinstance(make, partial) else partial(make)
    # jsonargparse's partial calls a general instantiator, which has the class among its arguments.
    scheduler_class = next(
        (argument for argument in make.args if isinstance(argument, type)), make.func
    )
    wants = "total_steps" in inspect.signature(scheduler_class).parameters
    is_told = any(make.keywords.get(name) is not None for name in ("total_steps", "epochs"))
    return partial(make, total_steps=total_steps) if wants and not is_told else make


def at_each_rate(
    make: Callable[..., LRScheduler], shares: Sequence[float]
) -> Callable[..., LRScheduler]:
    """Let a scheduler that says itself what rates are (OneCycleLR, CyclicLR) keep the groups' shares in it."""
    told = make.keywords if isinstance(make, partial) else {}
    own = {
        name: told[name]
        for name in ("max_lr", "base_lr")
        if isinstance(told.get(name), float | int)
    }
    return (
        partial(make, **{name: [rate * share for share in shares] for name, rate in own.items()})
        if own
        else make
    )


def as_lightning_wants(scheduler: LRScheduler, interval: str) -> dict[str, Any]:
    """Return when Lightning is to step a scheduler; one that waits for a plateau is stepped by `StepOnPlateau`."""
    if isinstance(scheduler, ReduceLROnPlateau):
        return {
            "scheduler": scheduler,
            "interval": "epoch",
            "monitor": "val/loss",
            "frequency": sys.maxsize,
        }
    return {"scheduler": scheduler, "interval": interval}


class StepOnPlateau(pl.Callback):
    """Steps ReduceLROnPlateau with the newest val/loss once an epoch that validates, before checkpoints are written.

    That is after the validation that ends an epoch, and where none does, at the epoch's end. Lightning steps it after
    them, so that a resumed run would have another rate, and in an epoch that was gone on with not at all.
    """

    def __init__(self) -> None:
        # val/loss of a validation inside the epoch, which a resumed process has not
        self._due: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"due": self._due}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._due = state_dict.get("due")  # earlier versions kept no loss

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
        loss, self._due = self._due, None
        for config in trainer.lr_scheduler_configs if loss is not None else ():
            if config.reduce_on_plateau:
                config.scheduler.step(loss)  # type: ignore[arg-type]
