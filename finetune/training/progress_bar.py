"""Progress of a run: on a terminal a live bar and a table of epochs, elsewhere a line for each epoch."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ProgressBar
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn
from rich.text import Text

from finetune.data.datamodule import position
from finetune.system.progress import clock, console, duration

# seconds between two drawings of a notebook's bar, and between two readings of the loss
_EVERY = 0.2
_SOON = 10.0  # seconds: a shorter time that is left is not logged
_NARROW = 76  # columns of a terminal, below which the bar and some of its labels are dropped


@dataclass(frozen=True)
class _Column:
    """A column of the table of epochs: its name, a shorter one for narrow terminals, and the width of its values."""

    name: str
    short: str
    width: int

    def title(self, is_short: bool) -> str:
        return self.short if is_short else self.name

    def size(self, is_short: bool) -> int:
        return max(self.width, len(self.title(is_short)))


class EpochTable:
    """Rows of epochs in aligned columns below one header.

    On a narrow terminal the titles are shorter, and the time, the rate and the training loss are dropped as necessary.

    Args:
        width: Columns of the terminal.
        num_epochs: Number of epochs of the fit; None if it is not limited.
        monitor: Name of the validation metric that is shown, such as val/accuracy; None without validation.
    """

    _DROPPED = ("time", "images/s", "train/loss")  # in this order

    def __init__(self, width: int, num_epochs: int | None, monitor: str | None) -> None:
        last = str(num_epochs) if num_epochs else "9999"
        columns = [
            _Column("epoch", "epoch", 2 * len(last) + 1 if num_epochs else len(last)),
            _Column("train/loss", "loss", 7),
        ]
        if monitor is not None:
            short = monitor.replace("/", " ").replace("accuracy", "acc")
            columns += [_Column("val/loss", "val loss", 7), _Column(monitor, short, 6)]
        columns += [_Column("images/s", "images/s", 7), _Column("time", "time", 7)]
        self.columns = columns
        self.is_short = False
        self.is_short = self._width() > width
        for name in self._DROPPED:
            if self._width() > width:
                self.columns = [column for column in self.columns if column.name != name]

    def _width(self) -> int:
        return sum(column.size(self.is_short) + 2 for column in self.columns) - 2

    @property
    def header(self) -> str:
        """The titles."""
        return self.row({column.name: column.title(self.is_short) for column in self.columns})

    def row(self, values: Mapping[str, str]) -> str:
        """Return a row with the values by name of their columns, and a dash in the other columns."""
        cells = [
            values.get(column.name, "-").rjust(column.size(self.is_short))
            for column in self.columns
        ]
        return "  ".join(cells)


class ImageProgressBar(ProgressBar):
    """A live bar and a table of epochs on a terminal; a bar and lines in a notebook; elsewhere only lines.

    The bar has epoch, step, loss, images per second and the time that is left. Without it, the line of the first
    complete epoch has the time that is left, unless something other than the number of epochs may end the run.

    A fit has a bar for each epoch; validation during a fit has none. Other commands have one bar.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_enabled = True
        self.console = console()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._cell: Any = None  # the handle of the bar in a notebook
        self._drawn_at = 0.0
        self._loss_read_at = 0.0
        self._loss_text = ""
        # of this bar
        self._began = 0.0
        self._num_before = 0  # batches that were done before it began, in a resumed epoch
        self._num_done = 0  # batches, with those
        self._total = 0.0  # batches; infinite if unknown
        # for images per second, in which validation during a fit does not count
        self._num_images = 0
        self._seconds = 0.0  # before the last validation
        self._since = 0.0  # the time of the last validation, or of the beginning
        self._speed = 0.0  # of the epoch that has ended
        # for the table of epochs, or their lines
        self._table: EpochTable | None = None
        self._ended_epoch = ""  # name of an epoch that has ended and is not reported yet
        self._is_validated = False
        self._epoch_began = 0.0
        self._epoch_seconds = 0.0  # of the last complete epoch, with its validation
        self._has_logged_time_left = False

    def disable(self) -> None:
        self.is_enabled = False

    def enable(self) -> None:
        self.is_enabled = True

    def _begin(self, what: str, total: int | float, num_before: int = 0) -> None:
        """Begin a bar, in place of an earlier one.

        Args:
            what: Its description.
            total: Number of batches; infinite if unknown.
            num_before: Number of batches that are already done.
        """
        self._num_images = 0
        self._seconds = 0.0
        self._since = time.perf_counter()
        self._began = self._since
        self._total = float(total)
        self._num_before = num_before
        self._num_done = num_before
        if not self.is_enabled or not (self.console.is_terminal or self.console.is_jupyter):
            return
        if self._progress is None:
            self._progress = Progress(
                *self._columns(),
                console=self.console,
                transient=True,
                # rich would otherwise print to stderr what the process prints to a file or a pipe
                redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
            )
            # rich itself shows nothing in a notebook without ipywidgets
            if self.console.is_jupyter:
                from IPython.display import display

                self._cell = display(self._progress, display_id=True)
            else:
                self._progress.start()
        if self._task is not None:
            self._progress.remove_task(self._task)
        size = None if total == float("inf") else total
        step = self._step()
        self._task = self._progress.add_task(
            what, total=size, completed=num_before, step=step, rate=0.0, note="", left=""
        )
        self._draw()

    def _advance(self, batch: Any, note: str = "") -> None:
        # The batch of this rank times the number of ranks: batches differ by one image at most.
        self._num_images += len(batch["label"]) * self.trainer.world_size
        if self._progress is not None and self._task is not None:
            self._num_done += 1
            self._progress.update(
                self._task,
                advance=1,
                step=self._step(),
                rate=self._rate(),
                note=note,
                left=self._left(),
            )
            if time.perf_counter() - self._drawn_at > _EVERY:
                self._draw()

    def _columns(self) -> list[ProgressColumn]:
        what = TextColumn("{task.description}")
        step = TextColumn("step {task.fields[step]}")
        loss = TextColumn("{task.fields[note]}")
        rate = TextColumn("{task.fields[rate]:.0f} images/s")
        left = TextColumn("{task.fields[left]}")
        if self.console.width < _NARROW:
            return [what, TextColumn("{task.fields[step]}"), loss, left]
        return [what, BarColumn(self.console.width - _NARROW + 10), step, loss, rate, left]

    def _step(self) -> str:
        if self._total == float("inf"):
            return str(self._num_done)
        return f"{self._num_done}/{self._total:.0f}"

    def _left(self) -> str:
        """Return the time that is left: of a fit until its last epoch ends, of an evaluation until its end."""
        num = self._num_done - self._num_before
        if num <= 0 or self._total == float("inf"):
            return ""
        batch = (time.perf_counter() - self._began) / num
        seconds = batch * (self._total - self._num_done)
        trainer = self.trainer
        if trainer.state.fn != "fit":
            return f"{clock(seconds)} left"
        limits = []
        if (trainer.max_epochs or -1) > 0:
            epoch = self._epoch_seconds or batch * (self._total - self._num_before)
            limits.append(seconds + epoch * _epochs_left(trainer, trainer.current_epoch + 1))
        if trainer.max_steps > 0:
            steps = trainer.max_steps - trainer.global_step
            limits.append(batch * steps * trainer.accumulate_grad_batches)
        if not limits:
            return ""
        time_left = clock(min(limits))
        return f"at most {time_left}" if _has_patience(trainer) else f"{time_left} left"

    def _draw(self) -> None:
        if self._cell is not None:
            self._cell.update(self._progress)
            self._drawn_at = time.perf_counter()

    def _rate(self) -> float:
        return self._num_images / max(self._seconds + time.perf_counter() - self._since, 1e-9)

    def _end(self) -> None:
        if self._cell is not None:
            self._cell.update({"text/plain": ""}, raw=True)  # removes the bar, as on a terminal
        elif self._progress is not None:
            self._progress.stop()
        self._progress = self._task = self._cell = None

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._table = None
        self._epoch_seconds = 0.0
        if trainer.fit_loop.restarted_mid_epoch:  # Lightning does not start this epoch again
            num_before = position(trainer)[1]
            self._begin(self._epoch(trainer), self.total_train_batches, num_before)

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._report(trainer)
        self._epoch_began = time.perf_counter()
        self._begin(self._epoch(trainer), self.total_train_batches)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Not from `outputs`, which are divided by accumulated batches. And seldom: reading it waits for the device.
        if self._progress is not None and time.perf_counter() - self._loss_read_at > _EVERY:
            loss = trainer.callback_metrics.get("train/loss")
            self._loss_text = "" if loss is None else f"loss {loss.item():.4f}"
            self._loss_read_at = time.perf_counter()
        self._advance(batch, self._loss_text)

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.state.fn == "validate":
            self._begin("validating", sum(trainer.num_val_batches))
        else:
            self._seconds += time.perf_counter() - self._since

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._since = time.perf_counter()
        self._is_validated = True

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._ended_epoch = self._epoch(trainer)
        self._speed = self._rate()

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._report(trainer)

    def _report(self, trainer: pl.Trainer) -> None:
        """Print the row or line of the epoch that has ended, if there is one.

        This is done when the next epoch begins, or training ends: at the end of the epoch itself this callback is
        called before the network logs its metrics.
        """
        if self._ended_epoch and self.is_enabled and trainer.is_global_zero:
            names = ["train/loss_epoch"]
            if self._is_validated:
                names += ["val/loss", _monitor(trainer)]
            metrics = {
                name.removesuffix("_epoch"): f"{trainer.callback_metrics[name]:.4f}"
                for name in names
                if name in trainer.callback_metrics
            }
            # it is 0 if the run was resumed after the last batch of the epoch
            rate = f"{self._speed:.0f}" if self._speed else ""
            if self.console.is_terminal:
                self._print_row(trainer, metrics, rate)
            else:
                self._print_line(trainer, metrics, rate)
        if self._epoch_began:
            self._epoch_seconds = time.perf_counter() - self._epoch_began
        self._ended_epoch = ""
        self._is_validated = False

    def _print_line(self, trainer: pl.Trainer, metrics: Mapping[str, str], rate: str) -> None:
        numbers = "  ".join(f"{name} {value}" for name, value in metrics.items())
        speed = f"  {rate} images/s" if rate else ""
        line = f"{self._ended_epoch}  {numbers}{speed}{self._time_left(trainer)}"
        self.console.print(Text(line), soft_wrap=True)

    def _print_row(self, trainer: pl.Trainer, metrics: Mapping[str, str], rate: str) -> None:
        if self._table is None:
            num_epochs = trainer.max_epochs if (trainer.max_epochs or -1) > 0 else None
            is_validated = trainer.enable_validation and sum(trainer.num_val_batches or [1]) > 0
            monitor = _monitor(trainer) if is_validated else None
            self._table = EpochTable(self.console.width, num_epochs, monitor)
            self.console.print(Text(self._table.header, style="bold"), soft_wrap=True)
        values = {"epoch": self._ended_epoch.removeprefix("epoch "), **metrics}
        if rate:
            values["images/s"] = rate
        if self._epoch_began:
            values["time"] = clock(time.perf_counter() - self._epoch_began)
        self.console.print(Text(self._table.row(values)), soft_wrap=True)

    def _time_left(self, trainer: pl.Trainer) -> str:
        """Return the end of an epoch's line with the time that is left, once in a run; else ""."""
        may_end_earlier = trainer.max_steps > 0 or _has_patience(trainer)
        if self._has_logged_time_left or may_end_earlier or not self._epoch_began:
            return ""
        left = (time.perf_counter() - self._epoch_began) * _epochs_left(
            trainer, trainer.current_epoch
        )
        if left < _SOON:
            return ""
        self._has_logged_time_left = True
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


def _monitor(trainer: pl.Trainer) -> str:
    """Return the name of the metric by which the best epoch is chosen."""
    module: Any = trainer.lightning_module
    return module.task.monitor


def _has_patience(trainer: pl.Trainer) -> bool:
    """Return whether a fit may end before its last epoch, by `--patience`."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return any(getattr(callback, "patience", None) is not None for callback in callbacks)


def _epochs_left(trainer: pl.Trainer, first: int) -> int:
    """Return the number of epochs from the epoch `first` on."""
    return len(range(first, trainer.max_epochs or 0))
