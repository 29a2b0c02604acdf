"""seconds.json: the time of each phase of a run."""

import json
import time
from typing import Any

import pytorch_lightning as pl

from finetune.runs.folder import Run
from finetune.runs.side_files import read_side_file
from finetune.system.files import replace_text

PHASES = {
    "preparing": "before the first step: listing images, loading weights, computations done once",
    "training": "training steps, and writing checkpoints",
    "validating": "validation after each epoch",
    "testing": "the final test",
}


class Clock(pl.Callback):
    """Measures the seconds of a run's phases on rank 0. A resumed run adds to the seconds of the run before.

    Args:
        run: The run. `seconds.json` is written to its folder at the end of each epoch and after a test.
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
        self._write(trainer)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._enter("")

    def on_test_start(self, trainer: pl.Trainer, *_: Any) -> None:
        # If an earlier command trained the run, its seconds are in the file.
        if self._phase == "preparing":
            before = self._before(trainer.is_global_zero)
            if before:
                self.seconds = {phase: before.get(phase, 0.0) for phase in PHASES}
                self._phase = ""
        self._enter("testing")

    def on_test_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._enter("")
        self._write(trainer)

    def _before(self, is_global_zero: bool) -> dict[str, float]:
        """Return the seconds in the run's seconds.json; an empty dict if there is none yet."""
        if self.run.path is None or not is_global_zero:  # only rank 0 reads and writes the file
            return {}
        return read_side_file(self.run.file("seconds.json"))

    def _write(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero:
            rounded = {phase: round(seconds, 3) for phase, seconds in self.seconds.items()}
            replace_text(self.run.file("seconds.json"), json.dumps(rounded, indent=2) + "\n")
