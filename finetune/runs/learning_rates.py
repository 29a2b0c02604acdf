"""The learning rates of a run, for the loggers and for the rows of its epochs."""

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import LearningRateMonitor

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
