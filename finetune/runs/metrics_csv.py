"""metrics.csv has a row for each epoch, and steps.csv for each logged step. A resumed run appends to both."""

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_only

from finetune import lightning_private
from finetune.runs.folder import Run
from finetune.runs.run_dir import reading
from finetune.system.files import replace_text

_ORDER = {"train": 0, "val": 1}  # order of the columns; learning rates come last

Rows = Sequence[Mapping[str, Any]]


class MetricsCSV(Logger):
    """Appends everything that a fit logs to `steps.csv`, and one row per epoch to `metrics.csv`.

    A row of `steps.csv` has the index of the step and of the epoch, both counted from zero. A row of `metrics.csv` has
    the epoch counted from one, as it is printed, the number of steps at its end, and its seconds. Then follows the last
    value of each metric in the epoch, but for `train/loss`, which is the mean over the epoch. An undefined metric is
    empty, such as the recall of a class without images.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self._columns: list[str] = []
        self._last: dict[str, Any] = {}
        self._epoch: dict[str, Any] = {}  # values that were logged since the end of the last epoch

    @property
    def name(self) -> str:
        return self.run.command

    @property
    def version(self) -> str:
        return self.run.path.name if self.run.path else ""

    @property
    def save_dir(self) -> str:
        return str(self.run.path or self.run.root)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: config.yaml has the hyperparameters."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        values = {name: value if is_defined(name, value) else "" for name, value in metrics.items()}
        row: dict[str, Any] = {"step": step, **values}
        # Skip a row that was written ahead. Commands other than fit write test.json or val.json instead.
        if row == self._last or self.run.command != "fit":
            return
        self._last = row
        self._epoch |= values
        path = self.run.file("steps.csv")
        new = [name for name in row if name not in self._columns]
        if new:
            rows = read_metrics(path)
            self._columns = list(dict.fromkeys([*(rows[0] if rows else ()), *self._columns, *row]))
            replace_text(path, _csv(rows, self._columns, header=True))
        with open(path, "a", newline="", encoding="utf-8") as file:
            file.write(_csv([row], self._columns, header=False))

    def write_ahead(self, trainer: pl.Trainer, is_epoch_end: bool) -> None:
        """Write the row that Lightning would log after the next checkpoint.

        Otherwise a kill between the checkpoint and the row would lose the row. All ranks call this, in
        `on_train_batch_end` or `on_train_epoch_end`, after everything else has logged.
        """
        metrics = lightning_private.pending_metrics(trainer, is_epoch_end)
        if metrics:
            row = {name: value.item() for name, value in metrics.items()}
            step = lightning_private.num_logged_steps(trainer)
            if is_epoch_end:
                step -= 1
            self.log_metrics({**row, "epoch": trainer.current_epoch}, step)

    @rank_zero_only
    def log_epoch(self, epoch: int, step: int, seconds: float) -> None:
        """Write the row of a complete epoch.

        Args:
            epoch: The epoch, counted from one.
            step: Number of steps at its end.
            seconds: Seconds of the epoch.
        """
        path = self.run.file("metrics.csv")
        before = read_metrics(path)
        # If a limit ended the run inside this epoch before, there is a row of that part already.
        part = next((row for row in before if int(row["epoch"]) == epoch), {})
        logged = {name: value for name, value in part.items() if value and "/" in name}
        values = {**logged, **self._epoch}
        self._epoch = {}
        for name in ("epoch", "train/loss"):  # the loss is that of the last step
            values.pop(name, None)
        if "train/loss_epoch" in values:
            values["train/loss"] = values.pop("train/loss_epoch")
        ordered = sorted(values, key=lambda name: _ORDER.get(name.partition("/")[0], len(_ORDER)))
        row: dict[str, Any] = {"epoch": epoch, "step": step, "seconds": round(seconds, 3)}
        row |= {name: values[name] for name in ordered}
        rows = [*(earlier for earlier in before if int(earlier["epoch"]) < epoch), row]
        columns = dict.fromkeys(name for row in rows for name in row)
        replace_text(path, _csv(rows, list(columns), header=True))

    @rank_zero_only
    def rewind(self, global_step: int) -> None:
        """Drop the rows of steps from `global_step` on, which a resumed run repeats."""
        steps = self.run.file("steps.csv")
        epochs = self.run.file("metrics.csv")
        earlier = _keep_rows(steps, lambda row: int(row["step"]) < global_step)
        self._columns = list(earlier[0]) if earlier else []
        ended = _keep_rows(
            epochs, lambda row: int(row["epoch"]) > 0 and int(row["step"]) <= global_step
        )
        current = int(ended[-1]["epoch"]) if ended else 0  # Lightning's count, from zero
        for row in earlier:
            if not row.get("epoch") or int(row["epoch"]) >= current:
                self._epoch |= {
                    name: value for name, value in row.items() if value and name != "step"
                }


def is_defined(name: str, value: Any) -> bool:
    """Return whether a metric has a value: NaN is 0 / 0, except for a loss, where training has diverged.

    Values may also be images, which are defined.
    """
    is_nan = isinstance(value, float) and math.isnan(value)
    return name.partition("/")[2].startswith("loss") or not is_nan


def read_metrics(path: str | Path) -> list[dict[str, str]]:
    """Return the rows of a metrics.csv or steps.csv without a half-written last row; none if there is no file."""
    if not Path(path).exists():
        return []
    # The name of a class may contain other line separators.
    with open(path, encoding="utf-8", newline="\n") as lines:
        return list(csv.DictReader(line for line in lines if line.endswith("\n")))


def _keep_rows(path: Path, is_wanted: Callable[[dict[str, str]], bool]) -> list[dict[str, str]]:
    """Rewrite a file without the rows for which `is_wanted` returns False, and return the others.

    Raises:
        ValueError: The file is damaged.
    """
    with reading(path, csv.Error):
        rows = read_metrics(path)
        wanted = [row for row in rows if is_wanted(row)]
    if rows:
        replace_text(path, _csv(wanted, list(rows[0]), header=True))
    return wanted


def _csv(rows: Rows, columns: list[str], header: bool) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
