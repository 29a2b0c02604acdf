"""Support for Lightning's own callbacks in resumed runs: limits that were raised, and starts inside an epoch."""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
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
        last: Learning rates by name at the last batch of the epoch, logged or not; empty before that batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, float] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_start(trainer, *args, **kwargs)
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        self.last = lightning_private.learning_rates(self, trainer) if is_last else {}

    def state_dict(self) -> dict[str, Any]:
        # A run may be resumed inside the validation after the last batch.
        return {"last": dict(self.last)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last = {str(name): float(rate) for name, rate in state_dict.get("last", {}).items()}


def gentler_training(trainer: pl.Trainer) -> str:
    """Return what to set where training breaks a network: a wider precision, or a lower rate than the full ones."""
    if str(trainer.precision) == "16-true":
        return "--precision 32-true or bf16-mixed, since 16-true has no numbers above 65,504"
    # a schedule changes `lr`, to 0 after its last step
    groups = trainer.optimizers[0].param_groups
    rates = dict.fromkeys(f"{group.get('initial_lr', group['lr']):.3g}" for group in groups)
    return f"a lower --lr (its full rates: {', '.join(rates)})"


@dataclass(frozen=True)
class Limits:
    """What can end a fit.

    Attributes:
        max_epochs: None or -1 for no limit.
        max_steps: -1 for no limit.
        min_epochs: Number of epochs before which no callback can end it.
        min_steps: Number of steps before which no callback can end it.
        callbacks: All callbacks of the trainer. Some of them can end a fit.
    """

    max_epochs: int | None = None
    max_steps: int = -1
    min_epochs: int | None = None
    min_steps: int | None = None
    callbacks: Sequence[pl.Callback] = ()

    @classmethod
    def of(cls, trainer: pl.Trainer) -> "Limits":
        """Return the limits of a trainer."""
        return cls(
            max_epochs=trainer.max_epochs,
            max_steps=trainer.max_steps,
            min_epochs=trainer.min_epochs,
            min_steps=trainer.min_steps,
            callbacks=trainer.callbacks,  # type: ignore[attr-defined]
        )

    def as_plain(self) -> dict[str, Any]:
        """Return the limits by which callbacks end a run, as plain values for a checkpoint.

        If a callback has ended a run and these values change, the run may be continued.
        """
        min_epochs = self.min_epochs
        if not min_epochs:
            # Lightning sets it to 1 at the start of a fit that has min_steps alone, else to 0.
            min_epochs = 1 if self.min_epochs is None and self.min_steps is not None else 0
        timers = (callback for callback in self.callbacks if isinstance(callback, Timer))
        timer = next(timers, None)
        values: dict[str, Any] = {
            "min_epochs": min_epochs,
            "min_steps": self.min_steps,
            "max_time": None if timer is None else lightning_private.timer_seconds(timer),
        }
        for callback in self.callbacks:
            if isinstance(callback, EarlyStopping):
                values[callback.state_key] = [
                    callback.patience,
                    callback.min_delta,
                    callback.stopping_threshold,
                    callback.divergence_threshold,
                ]
        return values


def ended_by(checkpoint: Mapping[str, Any], limits: Limits) -> str:
    """Return which of these limits the run of a `last.ckpt` has reached; "" if it has more to do."""
    epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    steps = checkpoint["global_step"]
    if any(isinstance(callback, StochasticWeightAveraging) for callback in limits.callbacks):
        epochs -= 1  # after the last epoch one more pass computes the statistics of batch norm
    if limits.max_epochs not in (None, -1) and epochs >= limits.max_epochs:
        return _reached(epochs, "epochs", "trainer.max_epochs", limits.max_epochs)
    if 0 <= limits.max_steps <= steps:
        return _reached(steps, "steps", "trainer.max_steps", limits.max_steps)
    states = checkpoint.get("callbacks", {})
    own = states.get("Checkpoints", {})
    if not own.get("is_stopped"):
        return ""
    for callback in limits.callbacks:
        if message := _stopped_by(callback, states.get(callback.state_key)):
            return message
    return "a callback that stopped it" if own.get("limits") == limits.as_plain() else ""


def _stopped_by(callback: pl.Callback, state: Mapping[str, Any] | None) -> str:
    """Return the limit of a callback that its state in a checkpoint has reached, in words; "" for none."""
    if not state:
        return ""
    if isinstance(callback, Timer):
        most = lightning_private.timer_seconds(callback)
        if most is not None and state["time_elapsed"]["train"] >= most:
            return f"trainer.max_time, {most:.0f} s"
    if isinstance(callback, EarlyStopping) and state["wait_count"] >= callback.patience:
        return f"early stopping, patience {callback.patience}"
    return ""


def _reached(num: int, what: str, option: str, most: int) -> str:
    """Return a limit in words; if a run was trained beyond it, also how far."""
    limit = f"{option} {most}"
    return limit if num == most else f"{num:,} {what} trained, more than {limit}"


def keep_patience(
    checkpoint: MutableMapping[str, Any], trainer: pl.Trainer, is_new_run: bool = False
) -> None:
    """Give early stopping the patience of the current command instead of that in the checkpoint.

    A new run that starts from another run's checkpoint drops the state of early stopping, in place.
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
    """Check that callbacks which average weights work with this model.

    Raises:
        ValueError: WeightAveraging would test other weights than its checkpoints hold. Or StochasticWeightAveraging
            would overwrite frozen batch norm statistics or, without batch norm, save its mean in no checkpoint.
    """
    if any(isinstance(c, WeightAveraging) for c in trainer.callbacks):  # type: ignore[attr-defined]
        # When it loads best.ckpt for the test, it takes the weights before averaging (Lightning 2.6).
        raise ValueError(
            "the test would measure other weights than best.ckpt holds with WeightAveraging: omit it"
        )
    if not any(isinstance(c, StochasticWeightAveraging) for c in trainer.callbacks):  # type: ignore[attr-defined]
        return
    if not batch_norms(model):
        raise ValueError(
            f"StochasticWeightAveraging needs batch norm, which {name} does not have: omit it"
        )
    if any(not m.training for m in batch_norms(model.train())):
        raise ValueError(
            "StochasticWeightAveraging computes the statistics of batch norm anew, the frozen ones too: omit it, "
            "or let all of batch norm train with --model.freeze_batch_norm false and without --freeze"
        )


def enter_epoch(trainer: pl.Trainer) -> None:
    """Call the epoch-start hooks of some callbacks if a run is resumed inside an epoch. Lightning skips them."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    if epochs.started <= epochs.processed:
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (GradientAccumulationScheduler, StochasticWeightAveraging)):
            rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
            for group, rate in zip(trainer.optimizers[0].param_groups, rates, strict=True):
                group["lr"] = rate  # a new SWALR changes the rate when it is created
