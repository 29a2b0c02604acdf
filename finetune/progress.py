"""What a person sees of a run: a bar with pictures per second on a terminal, a line for each epoch, and the result."""

import time
from typing import Any

import pytorch_lightning as pl
import torch.distributed as dist
from pytorch_lightning.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from finetune.data.samplers import position
from finetune.distributed.batch_share import batch_share
from finetune.runs import Run, write_results
from finetune.system.files import replace_text
from finetune.system.messages import be_quiet


class PicturesBar(ProgressBar):
    """A rich progress bar on a terminal; elsewhere only the line at each epoch's end."""

    def __init__(self) -> None:
        super().__init__()
        self.is_enabled = True
        self.console = Console(stderr=True)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._pictures, self._seconds, self._since = 0, 0.0, 0.0
        self._finished, self._is_validated = "", False

    def disable(self) -> None:
        self.is_enabled = False

    def enable(self) -> None:
        self.is_enabled = True

    def _begin(self, what: str, total: int | float, done: int = 0) -> None:
        self._pictures, self._seconds, self._since = 0, 0.0, time.perf_counter()
        if not self.is_enabled or not self.console.is_terminal:
            return
        if self._progress is None:
            rate = TextColumn("{task.fields[rate]:6.0f} pictures/s {task.fields[note]}")
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
            self._progress = Progress(*columns, console=self.console, transient=True)
            self._progress.start()
        if self._task is not None:
            self._progress.remove_task(self._task)
        size = None if total == float("inf") else total
        self._task = self._progress.add_task(what, total=size, completed=done, rate=0.0, note="")

    def _advance(self, batch: Any, note: str = "") -> None:
        # This device's share times the number of shares: they differ by one at most.
        self._pictures += len(batch["label"]) * batch_share(self.trainer)[1]
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=1, rate=self._rate(), note=note)

    def _rate(self) -> float:
        return self._pictures / max(self._seconds + time.perf_counter() - self._since, 1e-9)

    def _end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._task = None

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.restarted_mid_epoch:  # Lightning does not start this epoch again
            done = position(trainer)[1]
            self._begin(self._epoch(trainer), self.total_train_batches, done)

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._report(trainer)
        self._begin(self._epoch(trainer), self.total_train_batches)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"].item() if self._progress is not None else 0.0
        self._advance(batch, f"loss {loss:.3f}")

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
        # Not at the epoch's end itself: there the network logs its own numbers after us.
        if self._finished and self.is_enabled and trainer.is_global_zero:
            names = ["train/loss_epoch", *(("val/loss", "val/accuracy") if self._is_validated else ())]
            shown = [name for name in names if name in trainer.callback_metrics]
            numbers = "  ".join(f"{name.removesuffix('_epoch')} {trainer.callback_metrics[name]:.4f}" for name in shown)
            rate = f"  {self._speed:.0f} pictures/s" if self._speed else ""  # resumed behind the last batch
            line = f"{self._finished}  {numbers}{rate}"
            self.console.print(line, highlight=False, soft_wrap=True)
        self._finished, self._is_validated = "", False  # in the epoch that comes

    def on_test_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._begin("testing", sum(trainer.num_test_batches))

    def on_predict_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._begin("predicting", sum(trainer.num_predict_batches))

    def _on_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
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

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_progress": None, "_task": None, "console": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.console = Console(stderr=True)


class Results(pl.Callback):
    """Prints the result of `test` and `validate` on lines of their own and writes it into the run's folder."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        be_quiet()  # in a process that ddp_spawn began

    def on_test_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._report(trainer, pl_module, "test")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "validate":
            self._report(trainer, pl_module, "val")

    def _report(self, trainer: pl.Trainer, pl_module: Any, split: str) -> None:
        if not trainer.is_global_zero:
            return
        values = {
            name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith(f"{split}/")
        }
        checkpoint = str(trainer.ckpt_path) if trainer.ckpt_path else None
        details = {
            "checkpoint": checkpoint,
            "class_names": pl_module.class_names,
            "confusion_matrix": pl_module.confusion_matrix,
        }
        write_results(self.run.file(f"{split}.json"), {**values, **details})
        for name in ("accuracy", "loss", "f1", "calibration_error"):
            print(f"{split}/{name} {values[f'{split}/{name}']:.4f}", flush=True)


class Skipped(pl.Callback):
    """Lists the pictures that could not be decoded and were left out in `skipped.txt` of the run's folder."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.errors: set[str] = set()

    def _on_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.errors.update(error for _, error in batch["bad"])

    on_train_batch_end = on_validation_batch_end = on_test_batch_end = _on_batch_end  # type: ignore[assignment]

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._list(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._report(trainer)

    def on_test_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._report(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "validate":
            self._report(trainer)

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.run.path is not None and trainer.is_global_zero:  # alone: nobody knows what the other devices do
            self._write(self.errors)

    def _report(self, trainer: pl.Trainer) -> None:
        num = self._list(trainer)
        if num and trainer.is_global_zero:
            print(
                f"{num} pictures could not be decoded and were left out, see {self.run.file('skipped.txt')}", flush=True
            )
        self.errors.clear()

    def _list(self, trainer: pl.Trainer) -> int:
        everywhere = [self.errors] * trainer.world_size
        if trainer.world_size > 1:
            dist.all_gather_object(everywhere, self.errors)
        found = set().union(*everywhere)
        if trainer.is_global_zero:
            self._write(found)
        return len(found)

    def _write(self, found: set[str]) -> None:
        if found:
            path = self.run.file("skipped.txt")
            own_bytes = "surrogateescape"  # of file names that are not UTF-8
            listed = set(path.read_text("utf-8", own_bytes).splitlines()) if path.exists() else set()  # before a resume
            replace_text(path, "".join(f"{line}\n" for line in sorted(found | listed)), own_bytes)
