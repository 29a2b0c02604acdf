"""What a command does around its work: how it logs, how signals stop it, and how its run is closed."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from pytorch_lightning import Trainer

from finetune.distributed.ranks import ending
from finetune.distributed.signals import install_stop_at_once, stop_signals
from finetune.runs.folder import Run
from finetune.runs.loggers import run_loggers
from finetune.system.messages import be_quiet

log = logging.getLogger(__name__)


@contextmanager
def stopped_at_once() -> Iterator[None]:
    """Let a command log as a command does, and stop it at the first signal until training begins.

    Then `Checkpoints` handles signals. The handlers of before are back at the end.
    """
    be_quiet()
    handlers = {signum: signal.getsignal(signum) for signum in stop_signals()}
    install_stop_at_once()
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


@contextmanager
def closing(trainer: Trainer, run: Run) -> Iterator[None]:
    """Close loggers and complete the upload of a run at the end of its command, also after an error.

    A run that fails and has no result leaves no folder.
    """

    def close() -> None:
        ending.set()
        for logger in run_loggers(trainer.loggers):
            logger.close()

    try:
        yield
    except BaseException as error:
        close()
        if trainer.is_global_zero and isinstance(error, Exception):
            run.discard_if_empty()
        try:
            run.finish_upload()
        except ValueError as failure:  # the error that ends the command is the one to report
            log.warning("%s", failure)
        raise
    close()
    run.finish_upload()
