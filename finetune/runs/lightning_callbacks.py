"""What Lightning's own callbacks need where a run goes on: limits that may be raised, epochs entered in the middle."""

import math
from collections.abc import Mapping, MutableMapping
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from torch import nn

from finetune import lightning_private
from finetune.models.stages import batch_norms


class Rates(LearningRateMonitor):
    """Logs the learning rates.

    Attributes:
        last: Those of an epoch's last batch by name, logged or not; none where the epoch ended before it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, float] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_start(trainer, *args, **kwargs)
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        self.last = lightning_private.learning_rates(self, trainer) if is_last else {}

    def state_dict(self) -> dict[str, Any]:
        # a run may go on in the validation that follows the last batch
        return {"last": dict(self.last)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last = {str(name): float(rate) for name, rate in state_dict.get("last", {}).items()}


def limits(trainer: pl.Trainer) -> dict[str, Any]:
    """Return what can end a run early, as a checkpoint keeps it: a run that one of these ended may be prolonged."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    # Lightning puts a number there once a fit begins.
    min_epochs = trainer.min_epochs or int(
        trainer.min_epochs is None and trainer.min_steps is not None
    )
    values: dict[str, Any] = {"min_epochs": min_epochs, "min_steps": trainer.min_steps}
    values["max_time"] = next(
        (lightning_private.timer_seconds(c) for c in callbacks if isinstance(c, Timer)), None
    )
    for c in callbacks:
        if isinstance(c, EarlyStopping):
            values[c.state_key] = [
                c.patience,
                c.min_delta,
                c.stopping_threshold,
                c.divergence_threshold,
            ]
    return values


def ended_by(checkpoint: Mapping[str, Any], trainer: pl.Trainer) -> str:
    """Return which of this trainer's limits the run of a `last.ckpt` has reached; "" where it has more to do."""
    epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    # One pass more is due after the last epoch, for the statistics of batch norm.
    epochs -= any(isinstance(c, StochasticWeightAveraging) for c in trainer.callbacks)  # type: ignore[attr-defined]
    if trainer.max_epochs not in (None, -1) and epochs >= trainer.max_epochs:
        return _reached(
            epochs, "epochs", f"trainer.max_epochs {trainer.max_epochs}", trainer.max_epochs
        )
    if 0 <= trainer.max_steps <= checkpoint["global_step"]:
        return _reached(
            checkpoint["global_step"],
            "steps",
            f"trainer.max_steps {trainer.max_steps}",
            trainer.max_steps,
        )
    states = checkpoint.get("callbacks", {})
    own = states.get("Checkpoints", {})
    if not own.get("is_stopped"):
        return ""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        state = states.get(callback.state_key)
        if isinstance(callback, Timer) and state:
            seconds = lightning_private.timer_seconds(callback) or math.inf
            if state["time_elapsed"]["train"] >= seconds:
                return f"trainer.max_time, {seconds:.0f} s"
        if (
            isinstance(callback, EarlyStopping)
            and state
            and state["wait_count"] >= callback.patience
        ):
            return f"early stopping, patience {callback.patience}"
    return "a callback that stopped it" if own.get("limits") == limits(trainer) else ""


def _reached(num: int, what: str, limit: str, most: int | None) -> str:
    """Return a limit in words, with what a run has trained where that is more."""
    return limit if num == most else f"{num:,} {what} trained, more than {limit}"


def keep_patience(
    checkpoint: MutableMapping[str, Any], trainer: pl.Trainer, is_new_run: bool = False
) -> None:
    """Let early stopping keep the patience that it was given now: it would take the checkpoint's.

    A new run that begins from another's checkpoint waits for higher numbers of its own: none of that state is left.
    """
    states = checkpoint.get("callbacks", {})
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, EarlyStopping) or callback.state_key not in states:
            continue
        if is_new_run:
            del states[callback.state_key]
        else:
            states[callback.state_key]["patience"] = callback.patience


def check_averaging(trainer: pl.Trainer, model: nn.Module, name: str) -> None:
    """Make sure that callbacks which average weights do what they say.

    Raises:
        ValueError: One is tested with other weights than its checkpoints hold; or StochasticWeightAveraging would
            overwrite frozen batch norm or, without any, write its mean into no checkpoint.
    """
    if any(isinstance(c, WeightAveraging) for c in trainer.callbacks):  # type: ignore[attr-defined]
        # Where it loads best.ckpt for the test it takes the weights that were not averaged (Lightning 2.6).
        raise ValueError(
            "the test would measure other weights than best.ckpt holds with WeightAveraging: leave it out"
        )
    if not any(isinstance(c, StochasticWeightAveraging) for c in trainer.callbacks):  # type: ignore[attr-defined]
        return
    if not batch_norms(model):
        raise ValueError(
            f"StochasticWeightAveraging needs batch norm, which {name} has not: leave it out"
        )
    if any(not m.training for m in batch_norms(model.train())):
        raise ValueError(
            "StochasticWeightAveraging computes the statistics of batch norm anew, the frozen ones too: leave it out, "
            "or let all of batch norm train with --model.freeze_batch_norm false and without --freeze"
        )


def enter_epoch(trainer: pl.Trainer) -> None:
    """Let callbacks do at a start inside an epoch what they do at its beginning, which Lightning leaves out."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    if epochs.started <= epochs.processed:
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (GradientAccumulationScheduler, StochasticWeightAveraging)):
            rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
            for group, rate in zip(trainer.optimizers[0].param_groups, rates, strict=True):
                group["lr"] = rate  # a new SWALR begins by changing it
