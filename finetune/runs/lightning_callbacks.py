"""Support for Lightning's own callbacks in resumed runs: learning rates, and limits that were raised."""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor

from finetune import lightning_private


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
        callbacks: All callbacks of the trainer. Some of them can end a fit.
    """

    max_epochs: int | None = None
    max_steps: int = -1
    callbacks: Sequence[pl.Callback] = ()

    @classmethod
    def of(cls, trainer: pl.Trainer) -> "Limits":
        """Return the limits of a trainer."""
        return cls(
            max_epochs=trainer.max_epochs,
            max_steps=trainer.max_steps,
            callbacks=trainer.callbacks,  # type: ignore[attr-defined]
        )

    def as_plain(self) -> dict[str, Any]:
        """Return the limits by which callbacks end a run, as plain values for a checkpoint.

        If a callback has ended a run and these values change, the run may be continued.
        """
        return {
            callback.state_key: [
                callback.patience,
                callback.min_delta,
                callback.stopping_threshold,
                callback.divergence_threshold,
            ]
            for callback in self.callbacks
            if isinstance(callback, EarlyStopping)
        }


def ended_by(checkpoint: Mapping[str, Any], limits: Limits) -> str:
    """Return which of these limits the run of a `last.ckpt` has reached; "" if it has more to do."""
    epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    steps = checkpoint["global_step"]
    if limits.max_epochs not in (None, -1) and epochs >= limits.max_epochs:
        return _reached(epochs, "epochs", "trainer.max_epochs", limits.max_epochs)
    if 0 <= limits.max_steps <= steps:
        return _reached(steps, "steps", "trainer.max_steps", limits.max_steps)
    states = checkpoint.get("callbacks", {})
    own = states.get("Checkpoints", {})
    if not own.get("is_stopped"):
        return ""
    for callback in limits.callbacks:
        state = states.get(callback.state_key)
        if not isinstance(callback, EarlyStopping) or not state:
            continue
        if state["wait_count"] >= callback.patience:
            return f"early stopping, patience {callback.patience}"
    return "a callback that stopped it" if own.get("limits") == limits.as_plain() else ""


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
