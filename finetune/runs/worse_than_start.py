"""Warns if training makes a network worse than the fitted head that it started from, with the likely cause."""

import logging
from typing import Any

import pytorch_lightning as pl

from finetune.data.samplers import evaluated_targets
from finetune.models.stages import batch_norms
from finetune.runs.lightning_callbacks import gentler_training

log = logging.getLogger(__name__)

_IN_A_ROW = 2  # validations
_STANDARD_ERRORS = 2.0


class WorseThanStart(pl.Callback):
    """Warns if two validations in a row are worse than the start by more than two standard errors."""

    def __init__(self) -> None:
        # The monitored metric of the start. Checkpoints name it so for any kind of labels.
        self.accuracy: float | None = None
        self.num_worse = 0  # validations in a row, up to the last one

    def state_dict(self) -> dict[str, Any]:
        return {"accuracy": self.accuracy, "num_worse": self.num_worse}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.accuracy = state_dict["accuracy"]
        self.num_worse = state_dict["num_worse"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.ckpt_path is None:
            self.accuracy = pl_module.start_score

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking or self.accuracy is None:
            return
        task = pl_module.task
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        targets = data.splits["val"].targets
        measured = evaluated_targets(targets, trainer.limit_val_batches, data.batch_size)
        error = task.standard_error(self.accuracy, max(1, task.num_trials(measured)))
        value = float(trainer.callback_metrics[task.monitor])
        is_worse = value < self.accuracy - _STANDARD_ERRORS * error
        self.num_worse = self.num_worse + 1 if is_worse else 0
        if self.num_worse == _IN_A_ROW and trainer.is_global_zero:
            log.warning("%s", _message(trainer, pl_module, value, self.accuracy))


def _message(trainer: pl.Trainer, pl_module: Any, value: float, start: float) -> str:
    advice = gentler_training(trainer)
    if batch_norms(pl_module.network) and not pl_module.has_fixed_statistics:
        advice = f"--model.freeze_batch_norm true, or {advice}"
    now = f"{pl_module.task.monitor} {value:.4f}"
    return (
        f"training makes the network worse: {now}, and {start:.4f} with the frozen features and the "
        f"fitted head that it started from. Try {advice}. "
        "At the end the start is chosen if it is still better"
    )
