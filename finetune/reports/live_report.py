"""Rewrites report.html during training, after epochs, such that it takes at most 1 % of the time."""

import logging
import time
from typing import Any

import pytorch_lightning as pl

from finetune.reports.report import write_report
from finetune.runs.folder import Run
from finetune.runs.record import read_run

log = logging.getLogger(__name__)

_PATIENCE = 20.0  # seconds before the first page: a shorter run gets its page at the end only
_SHARE = 0.01  # of the time


class LiveReport(pl.Callback):
    """Rewrites the report in the run's folder after epochs, on rank 0; the page of a running fit reloads itself."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._cost = _SHARE * _PATIENCE
        self._since = 0.0
        self._has_page = False

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._since = time.monotonic()
        if trainer.is_global_zero:  # that of a finished run that is continued
            self.run.file("report.html").unlink(missing_ok=True)

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        # At the start of the next epoch, since the metrics of an epoch are logged after all callbacks at its end.
        began = time.monotonic()
        if trainer.is_global_zero and _SHARE * (began - self._since) >= self._cost:
            self._write(is_running=True)
            self._since = time.monotonic()
            self._cost = self._since - began

    def on_exception(self, *_: Any) -> None:
        if self._has_page:
            self._write(is_running=False)

    def _write(self, is_running: bool) -> None:
        try:
            write_report(read_run(self.run.dir.path), None, {}, is_running=is_running)
            self._has_page = True
        except Exception as error:  # which must not end training, nor hide what has ended it
            log.warning("report.html could not be written: %s", error)
