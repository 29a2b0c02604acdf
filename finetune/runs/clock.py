"""The time of each phase of a run, and the number of its epochs, in run.json."""

import time
from typing import Any

import pytorch_lightning as pl

from finetune.runs.folder import Run

PHASES = {
    "preparing": "before the first step: listing images, loading weights, computations done once",
    "training": "training steps, and writing checkpoints",
    "validating": "validation after each epoch",
    "testing": "the final test",
}


class Clock(pl.Callback):
    """Measures the seconds of a run's phases on rank 0. A resumed run adds to the seconds of the run before.

    Args:
        run: The run. Its record is updated at the end of each epoch and after a test.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._phase = "preparing"
        self._since = time.monotonic()

    def _enter(self, phase: str) -> None:
        """End the current phase and begin another; "" for none."""
        now = time.monotonic()
        if self._phase:
            self.seconds[self._phase] += now - self._since
        self._phase = phase
        self._since = now

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        before = self._before(trainer.is_global_zero)  # of the run that is resumed
        self.seconds = {phase: before.get(phase, 0.0) + now for phase, now in self.seconds.items()}
        self._enter("training")

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.state.fn == "fit":
            self._enter("validating")

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.state.fn == "fit":
            self._enter("training")

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._enter("training")
        if trainer.is_global_zero:
            self.run.dir.update(seconds=self._rounded(), epochs=trainer.current_epoch + 1)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._enter("")

    def on_test_start(self, trainer: pl.Trainer, *_: Any) -> None:
        # If an earlier command trained the run, its seconds are in the record.
        if self._phase == "preparing":
            before = self._before(trainer.is_global_zero)
            if before:
                self.seconds = {phase: before.get(phase, 0.0) for phase in PHASES}
                self._phase = ""
        self._enter("testing")

    def on_test_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._enter("")
        if trainer.is_global_zero:
            self.run.dir.update(seconds=self._rounded())

    def _before(self, is_global_zero: bool) -> dict[str, float]:
        """Return the seconds in the run's record; an empty dict if there are none yet."""
        if self.run.path is None or not is_global_zero:  # only rank 0 reads and writes it
            return {}
        return self.run.dir.facts.seconds

    def _rounded(self) -> dict[str, float]:
        return {phase: round(seconds, 3) for phase, seconds in self.seconds.items()}
