"""The seconds of a run and the number of its epochs, in run.json."""

import time
from typing import Any

import pytorch_lightning as pl

from finetune.runs.folder import Run


class Clock(pl.Callback):
    """Measures the seconds of a run on rank 0, from the building of its parts to the end of its last epoch or its test.

    What the command does before is not counted: it lists the images, ranks networks, and measures for `--minutes`. A
    command that continues a run adds to the seconds of the run before.

    Args:
        run: The run. Its record is updated at the end of each epoch and after a test.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._began = time.monotonic()
        self._before: float | None = None  # seconds of earlier commands

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # It is called again for the test after a fit. Only rank 0 reads and writes the record.
        if self._before is None and trainer.is_global_zero and self.run.path is not None:
            self._before = self.run.dir.facts.seconds

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._write(trainer, epochs=trainer.current_epoch + 1)

    def on_test_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._write(trainer)

    def _write(self, trainer: pl.Trainer, **facts: int) -> None:
        if trainer.is_global_zero:
            seconds = (self._before or 0.0) + time.monotonic() - self._began
            self.run.dir.update(seconds=round(seconds, 3), **facts)
