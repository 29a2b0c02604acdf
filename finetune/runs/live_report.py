"""Rewrites report.html during training, after epochs, such that it takes at most 1 % of the time."""

import logging
import math
import time
from dataclasses import replace
from typing import Any

import pytorch_lightning as pl

from finetune.runs.folder import Run

log = logging.getLogger(__name__)

# Seconds of training before the first page. A shorter run gets its page at the end only.
_PATIENCE = 20.0
_SHARE = 0.01  # share of the time for writing pages
# Only the page of a running fit has this: it reloads itself.
_RUNNING = '<meta http-equiv="refresh"'


class LiveReport(pl.Callback):
    """Rewrites the run's report after epochs, on rank 0.

    Args:
        run: The run. `report.html` is written to its folder.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._cost = _SHARE * _PATIENCE
        self._since = 0.0

    def on_train_start(self, *_: Any) -> None:
        self._since = time.monotonic()

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        # At the start of the next epoch, since the metrics of an epoch are logged after all callbacks at its end.
        began = time.monotonic()
        if not trainer.is_global_zero or _SHARE * (began - self._since) < self._cost:
            return
        try:
            _write(self.run, is_running=True)
        except Exception as error:  # a failed page must not end the training
            log.warning("no report during this run: %s", error)
            self._cost = math.inf
            return
        self._since = time.monotonic()
        self._cost = self._since - began

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero and self.run.path is not None:
            # If a finished run was continued, its page shows the test of a best.ckpt that no longer exists.
            has_page = self.run.file("report.html").exists()
            is_stale = has_page and not self.run.file("test.json").exists()
            end_page(self.run, is_stale)


def end_page(run: Run, is_stale: bool = False) -> None:
    """Rewrite the page of a run that has ended if the page has the state of a running one. An error is only logged.

    Args:
        run: The run. It may have no page.
        is_stale: Whether to rewrite the page in any case.
    """
    page = run.file("report.html")
    try:
        if is_stale or (page.is_file() and _RUNNING in page.read_text("utf-8", "replace")):
            _write(run, is_running=False)
    except Exception as error:  # the cause may be what ended the run, such as a full disk
        log.warning("report.html still shows the run as running: %s", error)


def _write(run: Run, is_running: bool) -> None:
    from finetune.runs.html_report import write_report  # with matplotlib, which takes half a second
    from finetune.runs.record import read_run

    assert run.path is not None
    record = replace(read_run(run.path), answers=None, label_answers=None)
    # A continued run may have the test result of an earlier best.ckpt.
    if is_running:
        record = replace(record, result={})
    write_report(record, None, {}, is_running=is_running)
