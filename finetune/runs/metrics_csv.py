"""metrics.csv: a row for each step that logged, which a resumed run goes on with."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_only

from finetune.runs.folder import Run
from finetune.system.files import replace_text


class MetricsCSV(Logger):
    """Appends metrics to `metrics.csv`, a row for each step that logged; columns are added as they appear."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self._columns: list[str] = []
        self._last: dict[str, Any] = {}

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
        row: dict[str, Any] = {"step": step, **metrics}
        if row == self._last:  # written ahead
            return
        self._last = row
        path = self.run.file("metrics.csv")
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
        connector, step = trainer._logger_connector, trainer.fit_loop.epoch_loop._batches_that_stepped
        metrics = connector.metrics["log"] if is_epoch_end or connector.should_update_logs else {}
        if metrics:
            row = {name: value.item() for name, value in metrics.items()}
            self.log_metrics({**row, "epoch": trainer.current_epoch}, step - is_epoch_end)

    @rank_zero_only
    def rewind(self, global_step: int) -> None:
        """Drop the rows of steps that a resumed run will do again: those from `global_step` on."""
        path = self.run.file("metrics.csv")
        rows = read_metrics(path)
        if rows:
            self._columns = list(rows[0])
            kept = [row for row in rows if int(row["step"]) < global_step]
            replace_text(path, _csv(kept, self._columns, header=True))


def read_metrics(path: str | Path) -> list[dict[str, str]]:
    """Return the rows of a metrics.csv, none where there is no file; a half-written last row is left out."""
    if not Path(path).exists():
        return []
    lines = Path(path).read_text("utf-8").splitlines(keepends=True)
    return list(csv.DictReader(line for line in lines if line.endswith("\n")))


def _csv(rows: list[dict[str, Any]], columns: list[str], header: bool) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
