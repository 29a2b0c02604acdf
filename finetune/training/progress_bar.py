"""Progress of a run: a line for each epoch, and on a terminal a live bar."""

import math
import sys
import time
from typing import Any

import pytorch_lightning as pl
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from finetune.data.datamodule import position
from finetune.system.progress import clock, console, duration

_READ_EVERY = 0.2  # seconds between two readings of the loss, which wait for the device
_BAR_WIDTH = 20  # columns


class ImageProgressBar(pl.Callback):
    """Prints a line for each epoch. On a terminal an epoch, or another command, has a bar while it runs."""

    def __init__(self) -> None:
        self.console = console()
        self._bar: Progress | None = None
        self._drawn_at = 0.0
        # batches of this fit or evaluation, and those that are done
        self._num_batches = math.inf
        self._num_done = 0
        self._began = 0.0
        # for images per second, in which validation during a fit does not count
        self._num_images = 0
        self._seconds = 0.0  # before the last validation
        self._since = 0.0  # the time of the last validation, or of the beginning
        # of the epoch that has ended and is not reported yet
        self._ended_epoch = ""
        self._rate_of_epoch = ""
        self._is_validated = False

    def _begin(self, trainer: pl.Trainer, what: str, total: float, num_before: int = 0) -> None:
        """Begin to count images, and begin a bar in place of an earlier one.

        Args:
            trainer: The Trainer.
            what: Its description.
            total: Number of batches; infinite if unknown.
            num_before: Number of batches that were done before, in a resumed epoch.
        """
        self._num_images = 0
        self._seconds = 0.0
        self._since = time.perf_counter()
        self._end()
        if not (self.console.is_terminal and trainer.is_global_zero):
            return
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(_BAR_WIDTH),
            MofNCompleteColumn(),
            TextColumn("{task.fields[pace]}"),
            console=self.console,
            transient=True,
            # rich would otherwise print to stderr what the process prints to a file or a pipe
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
        )
        self._bar.start()
        size = None if math.isinf(total) else total
        self._bar.add_task(what, total=size, completed=num_before, pace="")
        self._drawn_at = 0.0

    def _end(self, *_: Any, **__: Any) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = None

    teardown = on_exception = _end

    def _advance(self, trainer: pl.Trainer, batch: Any) -> None:
        # The batch of this rank times the number of ranks: batches differ by one image at most.
        self._num_images += len(batch["label"]) * trainer.world_size
        self._num_done += 1
        if self._bar is None:
            return
        task = self._bar.task_ids[0]
        self._bar.advance(task)
        if time.perf_counter() - self._drawn_at > _READ_EVERY:
            self._bar.update(task, pace=self._pace(trainer))
            self._drawn_at = time.perf_counter()

    def _pace(self, trainer: pl.Trainer) -> str:
        """Return the loss of a fit, the rate and the time left."""
        parts = [f"{self._rate():.0f} images/s"]
        loss = trainer.callback_metrics.get("train/loss")
        if loss is not None:
            parts.insert(0, f"loss {loss.item():.4f}")
        if math.isfinite(self._num_batches):
            parts.append(f"{clock(self._time_left())} left")
        return "  ".join(parts)

    def _time_left(self) -> float:
        """Return the seconds that are left of this fit or evaluation."""
        return (time.perf_counter() - self._began) * (self._num_batches / self._num_done - 1)

    def _rate(self) -> float:
        return self._num_images / max(self._seconds + time.perf_counter() - self._since, 1e-9)

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        done_before = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        self._num_batches = _batches_of_fit(trainer) - done_before
        self._num_done = 0
        self._began = time.perf_counter()
        if trainer.fit_loop.restarted_mid_epoch:  # Lightning does not start this epoch again
            num_before = position(trainer)[1]
            self._begin(trainer, _epoch(trainer), trainer.num_training_batches, num_before)

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._report(trainer)
        self._begin(trainer, _epoch(trainer), trainer.num_training_batches)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._advance(trainer, batch)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._ended_epoch = _epoch(trainer)
        # no image if the run was resumed after the last batch of the epoch
        self._rate_of_epoch = f"{self._rate():.0f} images/s" if self._num_images else ""

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._report(trainer)

    def _report(self, trainer: pl.Trainer) -> None:
        """Print the line of the epoch that has ended, if there is one.

        This is done when the next epoch begins, or training ends: at the end of the epoch itself this callback is
        called before the network logs its metrics.
        """
        if self._ended_epoch and trainer.is_global_zero:
            module: Any = trainer.lightning_module
            names = {"train/loss_epoch": "train/loss"}
            if self._is_validated:
                names |= {name: name for name in ("val/loss", module.task.monitor)}
            parts = [self._ended_epoch]
            parts += [
                f"{name} {trainer.callback_metrics[key]:.4f}"
                for key, name in names.items()
                if key in trainer.callback_metrics
            ]
            if self._rate_of_epoch:
                parts.append(self._rate_of_epoch)
                left = self._time_left()
                if 1 <= left < math.inf and not trainer.should_stop:
                    parts.append(f"{duration(left)} left")
            self.console.print(Text("  ".join(parts)), soft_wrap=True)
        self._ended_epoch = ""
        self._is_validated = False

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
        self._num_batches = sum(batches)
        self._num_done = 0
        self._began = time.perf_counter()
        self._begin(trainer, what, self._num_batches)

    def _on_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        if trainer.state.fn != "fit":
            self._advance(trainer, batch)

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _on_batch_end  # type: ignore[assignment]


def _batches_of_fit(trainer: pl.Trainer) -> float:
    """Return the batches of a complete fit, until one of its limits; infinite without one."""
    total = math.inf
    if (trainer.max_epochs or -1) > 0:
        total = (trainer.max_epochs or 0) * trainer.num_training_batches
    if trainer.max_steps > 0:
        total = min(total, trainer.max_steps * trainer.accumulate_grad_batches)
    return total


def _epoch(trainer: pl.Trainer) -> str:
    limit = f"/{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
    return f"epoch {trainer.current_epoch + 1}{limit}"
