"""The progress of a run: a bar with images per second on a terminal, and a line for each epoch."""

import time
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping, ProgressBar, Timer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from finetune.data.datamodule import position
from finetune.system.progress import duration
from finetune.training.run_limits import size_schedule

_EVERY = 0.2  # seconds between updates of a notebook's bar, and of the loss
_SOON = 10.0  # seconds; a shorter remaining time is not shown


class ImageProgressBar(ProgressBar):
    """A rich progress bar on a terminal and in a notebook. Elsewhere it prints only a line at the end of each epoch.

    The line of the first complete epoch estimates the remaining time, unless something else may end the run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_enabled = True
        self.console = Console(stderr=True)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._cell: Any = None  # handle of the output of a notebook cell
        self._drawn = self._noted = 0.0
        self._note = ""
        self._num_images = 0
        self._seconds = 0.0
        self._since = 0.0
        self._finished, self._is_validated = "", False
        self._epoch_began, self._is_estimated = 0.0, False

    def disable(self) -> None:
        self.is_enabled = False

    def enable(self) -> None:
        self.is_enabled = True

    def _begin(self, description: str, total: int | float, done: int = 0) -> None:
        self._num_images = 0
        self._seconds = 0.0
        self._since = time.perf_counter()
        if not self.is_enabled or not (self.console.is_terminal or self.console.is_jupyter):
            return
        if self._progress is None:
            rate = TextColumn("{task.fields[rate]:6.0f} images/s {task.fields[note]}")
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                rate,
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=self.console, transient=True)
            # rich's own display in notebooks needs ipywidgets, and shows nothing without it
            if self.console.is_jupyter:
                from IPython.display import display

                self._cell = display(self._progress, display_id=True)
            else:
                self._progress.start()
        if self._task is not None:
            self._progress.remove_task(self._task)
        size = None if total == float("inf") else total
        self._task = self._progress.add_task(
            description, total=size, completed=done, rate=0.0, note=""
        )
        self._draw()

    def _advance(self, batch: Any, note: str = "") -> None:
        # Per-rank batches differ by at most one image.
        self._num_images += len(batch["label"]) * self.trainer.world_size
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=1, rate=self._rate(), note=note)
            if time.perf_counter() - self._drawn > _EVERY:
                self._draw()

    def _draw(self) -> None:
        if self._cell is not None:
            self._cell.update(self._progress)
            self._drawn = time.perf_counter()

    def _rate(self) -> float:
        return self._num_images / max(self._seconds + time.perf_counter() - self._since, 1e-9)

    def _end(self) -> None:
        if self._cell is not None:
            self._cell.update({"text/plain": ""}, raw=True)  # a terminal's bar disappears too
        elif self._progress is not None:
            self._progress.stop()
        self._progress = self._task = self._cell = None

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.restarted_mid_epoch:  # Lightning does not call on_train_epoch_start
            done = position(trainer)[1]
            self._begin(self._epoch(trainer), self.total_train_batches, done)

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._report(trainer)
        self._epoch_began = time.perf_counter()
        self._begin(self._epoch(trainer), self.total_train_batches)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Not `outputs`, which are divided by the number of accumulated batches. Not every step, since reading the loss
        # waits for the device.
        if self._progress is not None and time.perf_counter() - self._noted > _EVERY:
            loss = trainer.callback_metrics.get("train/loss")
            self._note = "" if loss is None else f"loss {loss.item():.3f}"
            self._noted = time.perf_counter()
        self._advance(batch, self._note)

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.state.fn == "validate":
            self._begin("validating", sum(trainer.num_val_batches))
        else:
            self._seconds += time.perf_counter() - self._since

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._since = time.perf_counter()
        self._is_validated = True

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._finished, self._speed = self._epoch(trainer), self._rate()

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._report(trainer)

    def _report(self, trainer: pl.Trainer) -> None:
        # Called after the end of the epoch, since the module logs its metrics after this callback.
        if self._finished and self.is_enabled and trainer.is_global_zero:
            names = [
                "train/loss_epoch",
                *(("val/loss", "val/accuracy") if self._is_validated else ()),
            ]
            shown = [name for name in names if name in trainer.callback_metrics]
            numbers = "  ".join(
                f"{name.removesuffix('_epoch')} {trainer.callback_metrics[name]:.4f}"
                for name in shown
            )
            # resumed behind the last batch
            rate = f"  {self._speed:.0f} images/s" if self._speed else ""
            line = f"{self._finished}  {numbers}{rate}{self._time_left(trainer)}"
            self.console.print(line, highlight=False, soft_wrap=True)
        self._finished, self._is_validated = "", False  # for the next epoch

    def _time_left(self, trainer: pl.Trainer) -> str:
        others: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        is_open = trainer.max_steps > 0 or any(isinstance(c, EarlyStopping | Timer) for c in others)
        if self._is_estimated or is_open or not self._epoch_began:
            return ""
        left = (time.perf_counter() - self._epoch_began) * _epochs_left(trainer)
        if left < _SOON:
            return ""
        self._is_told = True
        return f", about {duration(left)} left"

    def on_test_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._begin("testing", sum(trainer.num_test_batches))

    def on_predict_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._begin("predicting", sum(trainer.num_predict_batches))

    def _on_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        if trainer.state.fn != "fit":
            self._advance(batch)

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _on_batch_end  # type: ignore[assignment]

    def teardown(self, *_: Any, **__: Any) -> None:
        self._end()

    def on_exception(self, *_: Any) -> None:
        self._end()

    @staticmethod
    def _epoch(trainer: pl.Trainer) -> str:
        return f"epoch {trainer.current_epoch + 1}" + (
            f"/{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
        )


def _epochs_left(trainer: pl.Trainer) -> float:
    """Return the number of remaining epochs, each weighted by its number of pixels relative to the last epoch."""
    sizes = getattr(trainer.datamodule, "sizes", ())  # type: ignore[attr-defined]
    schedule = size_schedule(trainer, sizes)
    epochs = range(trainer.current_epoch, trainer.max_epochs or 0)
    if schedule is None:
        return len(epochs)
    last = schedule.at(trainer.current_epoch - 1)
    return sum((schedule.at(epoch) / last) ** 2 for epoch in epochs)
