"""report.html while training goes on: rewritten after an epoch, as often as that costs next to nothing."""

import logging
import math
import time
from dataclasses import replace
from typing import Any

import pytorch_lightning as pl

from finetune.runs.folder import Run

log = logging.getLogger(__name__)

# seconds of training before the first page: a run that is over by then gets its page at the end
_PATIENCE = 20.0
_SHARE = 0.01  # of the time
_RUNNING = '<meta http-equiv="refresh"'  # in a page that loads itself anew, and in no other


class LiveReport(pl.Callback):
    """Rewrites the run's page after an epoch, on the first device.

    Args:
        run: The run; `report.html` goes into its folder.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._cost = _SHARE * _PATIENCE
        self._since = 0.0

    def on_train_start(self, *_: Any) -> None:
        self._since = time.monotonic()

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        # Not at an epoch's end itself: its numbers are logged after all callbacks.
        began = time.monotonic()
        if not trainer.is_global_zero or _SHARE * (began - self._since) < self._cost:
            return
        try:
            _write(self.run, is_running=True)
        except Exception as error:  # nothing that a page lacks is worth a training
            log.warning("no page while this run goes on: %s", error)
            self._cost = math.inf
            return
        self._since = time.monotonic()
        self._cost = self._since - began

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero and self.run.path is not None:
            # Or it shows the test of a best.ckpt that is gone: a finished run was prolonged.
            is_stale = self.run.file("report.html").exists() > self.run.file("test.json").exists()
            end_page(self.run, is_stale)


def end_page(run: Run, is_stale: bool = False) -> None:
    """Let the page of a run that is over say no longer that it goes on; what has ended it stays the news.

    Args:
        run: The run, perhaps without a page.
        is_stale: Whether its page is to be written anew, whatever it says.
    """
    page = run.file("report.html")
    try:
        if is_stale or (page.is_file() and _RUNNING in page.read_text("utf-8", "replace")):
            _write(run, is_running=False)
    except Exception as error:  # of whatever has stopped the run, such as a full disk
        log.warning("report.html still says that the run goes on: %s", error)


def _write(run: Run, is_running: bool) -> None:
    from finetune.runs.html_report import write_report  # with matplotlib, which takes half a second
    from finetune.runs.record import read_run

    assert run.path is not None
    record = replace(read_run(run.path), answers=None)
    # one that is prolonged has the result of a best.ckpt that may be another's by now
    if is_running:
        record = replace(record, result={})
    write_report(record, None, {}, is_running=is_running)
