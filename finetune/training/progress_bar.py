"""Progress of a run: on a terminal a live bar and a table of epochs, elsewhere a line for each epoch."""

import math
import sys
import time
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from rich.text import Text

from finetune.data.datamodule import position
from finetune.system.progress import clock, console, duration

_READ_EVERY = 0.2  # seconds between two readings of the loss, which wait for the device
_NARROW = 76  # columns of a terminal, below which the bar has only the epoch, the step, the loss and the time left


class EpochTable:
    """Rows of epochs in aligned columns below one header.

    On a narrow terminal the time, the rate and the training loss are dropped as necessary.

    Args:
        width: Columns of the terminal.
        monitor: Name of the validation metric that is shown, such as val/accuracy; None without validation.
    """

    def __init__(self, width: int, monitor: str | None) -> None:
        of_validation = [] if monitor is None else ["val/loss", monitor]
        self.names = ["epoch", "train/loss", *of_validation, "images/s", "time"]
        for name in ("time", "images/s", "train/loss"):
            if len(self.header) > width:
                self.names.remove(name)

    @property
    def header(self) -> str:
        """The titles."""
        return self.row({name: name for name in self.names})

    def row(self, values: Mapping[str, str]) -> str:
        """Return a row with the values by name of their columns, and a dash in the other columns."""
        return "  ".join(values.get(name, "-").rjust(max(7, len(name))) for name in self.names)


class ImageProgressBar(pl.Callback):
    """A live bar and a table of epochs on a terminal; elsewhere only lines.

    A fit has a bar for each epoch, with the time that is left of the fit; validation during a fit has none. Other
    commands have one bar.
    """

    def __init__(self) -> None:
        self.console = console()
        self._bar: Progress | None = None
        self._table: EpochTable | None = None
        self._began = 0.0  # this fit or evaluation
        self._num_done = 0  # batches since then
        self._batches_before = 0  # of a resumed fit
        self._num_batches = 0.0  # of an evaluation
        self._loss = ""
        self._loss_read_at = 0.0
        # for images per second, in which validation during a fit does not count
        self._num_images = 0
        self._seconds = 0.0  # before the last validation
        self._since = 0.0  # the time of the last validation, or of the beginning
        # of the epoch that has ended and is not reported yet
        self._ended_epoch = ""
        self._rate_of_epoch = ""
        self._is_validated = False
        self._epoch_began = 0.0

    def _begin(self, trainer: pl.Trainer, what: str, total: float, num_before: int = 0) -> None:
        """Begin a bar, in place of an earlier one.

        Args:
            trainer: The Trainer.
            what: Its description.
            total: Number of batches; infinite if unknown.
            num_before: Number of batches that were done before, in a resumed epoch.
        """
        self._num_images = 0
        self._seconds = 0.0
        self._since = time.perf_counter()
        if not (self.console.is_terminal and trainer.is_global_zero):
            return
        if self._bar is None:
            self._bar = Progress(
                *self._columns(),
                console=self.console,
                transient=True,
                # rich would otherwise print to stderr what the process prints to a file or a pipe
                redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
            )
            self._bar.start()
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        size = None if math.isinf(total) else total
        self._bar.add_task(what, total=size, completed=num_before, loss="", rate=0.0, left="")

    def _columns(self) -> list[ProgressColumn]:
        what = TextColumn("{task.description}")
        loss = TextColumn("{task.fields[loss]}")
        left = TextColumn("{task.fields[left]}")
        if self.console.width < _NARROW:
            return [what, MofNCompleteColumn(), loss, left]
        bar = BarColumn(self.console.width - _NARROW + 10)
        rate = TextColumn("{task.fields[rate]:.0f} images/s")
        return [what, bar, MofNCompleteColumn(), loss, rate, left]

    def _advance(self, trainer: pl.Trainer, batch: Any, total: float) -> None:
        # The batch of this rank times the number of ranks: batches differ by one image at most.
        self._num_images += len(batch["label"]) * trainer.world_size
        self._num_done += 1
        if self._bar is not None:
            left = f"{clock(self._time_left(total))} left" if math.isfinite(total) else ""
            task = self._bar.task_ids[0]
            self._bar.update(task, advance=1, loss=self._loss, rate=self._rate(), left=left)

    def _time_left(self, total: float) -> float:
        """Return the seconds that are left of a number of batches since the beginning."""
        return (time.perf_counter() - self._began) * (total / self._num_done - 1)

    def _rate(self) -> float:
        return self._num_images / max(self._seconds + time.perf_counter() - self._since, 1e-9)

    def _end(self, *_: Any, **__: Any) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = None

    teardown = on_exception = _end

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._table = None
        self._num_done = 0
        self._began = time.perf_counter()
        self._batches_before = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if trainer.fit_loop.restarted_mid_epoch:  # Lightning does not start this epoch again
            num_before = position(trainer)[1]
            self._begin(trainer, _epoch(trainer), trainer.num_training_batches, num_before)

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._report(trainer)
        self._epoch_began = time.perf_counter()
        self._begin(trainer, _epoch(trainer), trainer.num_training_batches)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._bar is not None and time.perf_counter() - self._loss_read_at > _READ_EVERY:
            # not from `outputs`, which are divided by accumulated batches
            loss = trainer.callback_metrics.get("train/loss")
            self._loss = "" if loss is None else f"loss {loss.item():.4f}"
            self._loss_read_at = time.perf_counter()
        self._advance(trainer, batch, self._batches_of_fit(trainer))

    def _batches_of_fit(self, trainer: pl.Trainer) -> float:
        """Return the batches of a fit since its beginning here, until one of its limits; infinite without one."""
        total = math.inf
        if (trainer.max_epochs or -1) > 0:
            total = (trainer.max_epochs or 0) * trainer.num_training_batches
        if trainer.max_steps > 0:
            total = min(total, trainer.max_steps * trainer.accumulate_grad_batches)
        return total - self._batches_before

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._ended_epoch = _epoch(trainer)
        # no image if the run was resumed after the last batch of the epoch
        self._rate_of_epoch = f"{self._rate():.0f}" if self._num_images else ""

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._report(trainer)

    def _report(self, trainer: pl.Trainer) -> None:
        """Print the row or line of the epoch that has ended, if there is one.

        This is done when the next epoch begins, or training ends: at the end of the epoch itself this callback is
        called before the network logs its metrics.
        """
        if self._ended_epoch and trainer.is_global_zero:
            names = {"train/loss_epoch": "train/loss"}
            if self._is_validated:
                names |= {name: name for name in ("val/loss", _monitor(trainer))}
            metrics = {
                name: f"{trainer.callback_metrics[key]:.4f}"
                for key, name in names.items()
                if key in trainer.callback_metrics
            }
            text = self._row if self.console.is_terminal else self._line
            self.console.print(Text(text(trainer, metrics)), soft_wrap=True)
        self._ended_epoch = ""
        self._is_validated = False

    def _line(self, trainer: pl.Trainer, metrics: Mapping[str, str]) -> str:
        parts = [self._ended_epoch, *(f"{name} {value}" for name, value in metrics.items())]
        if self._rate_of_epoch:
            parts.append(f"{self._rate_of_epoch} images/s")
            left = self._time_left(self._batches_of_fit(trainer))
            if 1 <= left < math.inf and not trainer.should_stop:
                parts.append(f"{duration(left)} left")
        return "  ".join(parts)

    def _row(self, trainer: pl.Trainer, metrics: Mapping[str, str]) -> str:
        if self._table is None:
            is_validated = trainer.enable_validation and sum(trainer.num_val_batches or [1]) > 0
            self._table = EpochTable(
                self.console.width, _monitor(trainer) if is_validated else None
            )
            self.console.print(Text(self._table.header, style="bold"), soft_wrap=True)
        values = {"epoch": self._ended_epoch.removeprefix("epoch "), **metrics}
        if self._rate_of_epoch:
            values["images/s"] = self._rate_of_epoch
        if self._epoch_began:
            values["time"] = clock(time.perf_counter() - self._epoch_began)
        return self._table.row(values)

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.state.fn == "fit":
            self._seconds += time.perf_counter() - self._since
        else:
            self._begin_evaluation(trainer, "validating", trainer.num_val_batches)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._since = time.perf_counter()
        self._is_validated = True

    def on_test_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._begin_evaluation(trainer, "testing", trainer.num_test_batches)

    def on_predict_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._begin_evaluation(trainer, "predicting", trainer.num_predict_batches)

    def _begin_evaluation(self, trainer: pl.Trainer, what: str, batches: list[Any]) -> None:
        self._num_done = 0
        self._began = time.perf_counter()
        self._loss = ""
        self._num_batches = sum(batches)
        self._begin(trainer, what, self._num_batches)

    def _on_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        if trainer.state.fn != "fit":
            self._advance(trainer, batch, self._num_batches)

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _on_batch_end  # type: ignore[assignment]


def _epoch(trainer: pl.Trainer) -> str:
    limit = f"/{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
    return f"epoch {trainer.current_epoch + 1}{limit}"


def _monitor(trainer: pl.Trainer) -> str:
    """Return the name of the metric by which the best epoch is chosen."""
    module: Any = trainer.lightning_module
    return module.task.monitor
