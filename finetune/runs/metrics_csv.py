"""metrics.csv, a row for each epoch, and steps.csv, one for each step that logged: a resumed run goes on with both."""

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
from finetune.runs.side_files import set_aside
from finetune.system.files import replace_text
from finetune.system.messages import reason

_ORDER = {"train": 0, "val": 1}  # of the columns, before rates

Rows = Sequence[Mapping[str, Any]]


class MetricsCSV(Logger):
    """Appends all that a fit logs to `steps.csv`, and makes one row of each epoch in `metrics.csv`.

    A row of `steps.csv` has the index of its step and Lightning's of its epoch, both from zero. One of `metrics.csv`
    has the epoch counted from one, as it is printed, the steps that were taken by its end, and its seconds; then the
    last value of the epoch of all that was logged, save that `train/loss` is the mean over the epoch. What is not
    defined is empty, such as the recall of a class without images.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self._columns: list[str] = []
        self._last: dict[str, Any] = {}
        self._epoch: dict[str, Any] = {}  # what was logged since the last one's end

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
        """config.yaml has them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        values = {name: value if is_defined(name, value) else "" for name, value in metrics.items()}
        row: dict[str, Any] = {"step": step, **values}
        # written ahead; test.json or val.json has it
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
        """Write the row that Lightning will log behind a checkpoint before it: a kill between would lose it for good.

        All devices call it, in `on_train_batch_end` or `on_train_epoch_end`, where all else has logged.
        """
        metrics = lightning_private.pending_metrics(trainer, is_epoch_end)
        if metrics:
            row = {name: value.item() for name, value in metrics.items()}
            step = lightning_private.num_logged_steps(trainer)
            if is_epoch_end:
                step -= 1
            self.log_metrics({**row, "epoch": trainer.current_epoch}, step)

    @rank_zero_only
    def log_epoch(
        self, epoch: int, step: int, seconds: float, rates: Mapping[str, float] | None = None
    ) -> None:
        """Write the row of an epoch, counted from one, of which everything is logged; `rates` perhaps not."""
        values, self._epoch = {**self._epoch, **(rates or {})}, {}
        named = {"train/loss_epoch": "train/loss"}  # which is that of the last step that logged
        values = {
            named.get(name, name): value
            for name, value in values.items()
            if name not in ("epoch", "train/loss")
        }
        values = dict(
            sorted(
                values.items(), key=lambda item: _ORDER.get(item[0].partition("/")[0], len(_ORDER))
            )
        )
        row = {"epoch": epoch, "step": step, "seconds": round(seconds, 3), **values}
        path = self.run.file("metrics.csv")
        # A run that a limit ended inside an epoch, and that was prolonged, has a part of it already.
        rows = [*(row for row in read_metrics(path) if int(row["epoch"]) < epoch), row]
        replace_text(
            path, _csv(rows, list(dict.fromkeys(name for row in rows for name in row)), header=True)
        )

    @rank_zero_only
    def rewind(self, global_step: int) -> None:
        """Drop the rows of steps that a resumed run will do again: those from `global_step` on."""
        steps, epochs = self.run.file("steps.csv"), self.run.file("metrics.csv")
        # of an earlier version, which knew no other file
        if epochs.exists() and not steps.exists():
            epochs.rename(steps)
        kept = _keep(steps, lambda row: int(row["step"]) < global_step)
        self._columns = list(kept[0]) if kept else []
        ended = _keep(epochs, lambda row: int(row["epoch"]) > 0 and int(row["step"]) <= global_step)
        current = int(ended[-1]["epoch"]) if ended else 0  # Lightning's count, from zero
        for row in kept:
            if not row.get("epoch") or int(row["epoch"]) >= current:
                self._epoch |= {
                    name: value for name, value in row.items() if value and name != "step"
                }


def is_defined(name: str, value: Any) -> bool:
    """Return whether a metric has a value: NaN is 0 / 0, except for a loss, where training has diverged.

    Loggers are also given images under such names.
    """
    is_nan = isinstance(value, float) and math.isnan(value)
    return name.partition("/")[2].startswith("loss") or not is_nan


def read_metrics(path: str | Path) -> list[dict[str, str]]:
    """Return the rows of a metrics.csv or steps.csv, none where there is no file, without a half-written last row."""
    if not Path(path).exists():
        return []
    # a class's name may have what else ends lines
    with open(path, encoding="utf-8", newline="\n") as lines:
        return list(csv.DictReader(line for line in lines if line.endswith("\n")))


def _keep(path: Path, is_kept: Callable[[dict[str, str]], bool]) -> list[dict[str, str]]:
    """Drop the other rows of a file, and return those."""
    try:
        rows = read_metrics(path)
        for row in rows:
            _check(row)
        kept = [row for row in rows if is_kept(row)]
    except (ValueError, TypeError, KeyError, csv.Error, IsADirectoryError) as error:
        set_aside(
            path,
            f"{path} is damaged: {reason(error)}",
            "its rows are missing in the report and its charts",
        )
        # else the other file would be taken for that of an earlier version, which had only one
        path.touch()
        return []
    if rows:
        replace_text(path, _csv(kept, list(rows[0]), header=True))
    return kept


def _check(row: dict[str, str]) -> None:
    """Raise ValueError or TypeError if a value is not a number, or a row has more of them than columns."""
    for name, value in row.items():
        if value:
            if name in ("step", "epoch"):
                int(value)
            else:
                float(value)


def _csv(rows: Rows, columns: list[str], header: bool) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
