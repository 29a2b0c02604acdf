"""The checkpoint from which a fit starts: that of the run that `--resume` continues, or that of `--ckpt_path`."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch import Tensor

from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.exported_files import ExportedCheckpoint
from finetune.runs.folder import Run
from finetune.runs.lightning_callbacks import Limits, ended_by
from finetune.runs.metrics_csv import MetricsCSV
from finetune.runs.run_lock import hold
from finetune.runs.run_logger import RunLogger
from finetune.system.files import link
from finetune.system.messages import WrongUsage

log = logging.getLogger(__name__)

# What a fit writes next to the weights, and reads when it continues.
PROGRESS = ("epoch", "global_step", "loops", "callbacks", "optimizer_states", "lr_schedulers")


@dataclass(frozen=True)
class Start:
    """The checkpoint from which a fit starts, read once.

    Attributes:
        path: Its file.
        content: Its content. Tensors have shapes and types, but no values, except in the record of seen images.
        version: Inode, modification time and size of the file, by which a replaced file is detected.
    """

    path: Path | str
    content: Mapping[str, Any]
    version: tuple[int, int, int]

    def check_unchanged(self) -> None:
        """Check that the file is still the one that was read.

        Raises:
            ValueError: The file has been replaced, so decisions based on its content may be wrong.
        """
        if _version(self.path) != self.version:
            raise ValueError(
                f"another process has written {self.path} since this one read it: start this command again"
            )


def read_start(path: Path | str) -> Start:
    """Read a checkpoint and drop the values of its tensors: Lightning reads them when training starts.

    Raises:
        ValueError: It is not a checkpoint of finetune.
        WrongUsage: It is an exported file.
    """
    version = _version(path) if Path(path).is_file() else (0, 0, 0)
    checkpoint = read_checkpoint(path)
    if isinstance(checkpoint, ExportedCheckpoint):
        raise WrongUsage(
            f"{path} is an exported file, which cannot be resumed: pass the checkpoint"
        )
    content = _without_values(checkpoint)
    content["finetune"] = checkpoint[
        "finetune"
    ]  # small, and the record of seen images is continued
    return Start(path, content, version)


def _version(path: Path | str) -> tuple[int, int, int]:
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns, status.st_size


def _without_values(content: Any) -> Any:
    """Return nested containers in which tensors hold no memory."""
    if isinstance(content, Tensor):
        return content.to("meta")
    if isinstance(content, Mapping):
        return {key: _without_values(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_without_values(value) for value in content]
    return content


def check_resumable(start: Start) -> None:
    """Check that training can continue from a checkpoint.

    Raises:
        ValueError: It lacks what a fit writes next to the weights.
    """
    checkpoint = start.content
    missing = [name for name in PROGRESS if name not in checkpoint]
    is_solved = checkpoint["hyper_parameters"].get("freeze") == "backbone"  # without an optimizer
    if not missing and not checkpoint["optimizer_states"] and not is_solved:
        missing = ["optimizer_states"]
    if missing:
        hint = f"begin a new run with its weights: --weights {start.path}"
        raise ValueError(
            f"training cannot continue from {start.path}, which has no {', '.join(missing)}: {hint}"
        )


def limit_reached(start: Start | None, is_resumed: bool, limits: Limits) -> str:
    """Return the limit that the run to resume has reached, in words; "" if training continues.

    Args:
        start: The first checkpoint; None for none.
        is_resumed: Whether its run continues. Otherwise a new run starts from it.
        limits: The limits of the Trainer.

    Raises:
        ValueError: A new run has nothing to train.
    """
    finished = ended_by(start.content, limits) if start else ""
    if start and finished and not is_resumed:
        raise ValueError(
            f"{start.path} has nothing left to train, with {finished}: raise that limit, or measure the checkpoint by "
            f"finetune test {start.path}"
        )
    return finished


def continue_run(trainer: pl.Trainer, run: Run, start: Start, message: str) -> None:
    """Prepare a run's folder and loggers for its next steps, and log what has changed.

    Args:
        trainer: The trainer, with the callbacks and loggers of the run.
        run: The run. Its folder is chosen already.
        start: Its last checkpoint.
        message: What has changed since the run began, in words; "" for nothing.

    Raises:
        ValueError: Another process continues this run, or has done so in the meantime.
    """
    if trainer.is_global_zero:
        hold(run.checkpoint("last").parents[1])
        start.check_unchanged()
        run.continue_upload()
    facts = start.content["finetune"]
    step = start.content["global_step"]
    run.began_from = facts.get("began_from")
    run.licence = facts.get("licence_of_the_weights")
    if trainer.is_global_zero:
        log.info("resuming %s from step %d%s", run.place, step, message and f"; {message}")
    for logger in trainer.loggers:
        if isinstance(logger, (MetricsCSV, RunLogger)):
            logger.rewind(step)


def restore_progress(trainer: pl.Trainer, run: Run, start: Start) -> None:
    """Set a trainer's progress to that of a finished run, so that its test is logged at the last step.

    Without validation, best.ckpt is a link to last.ckpt. If a killed process has not created it, this does.
    """
    last = run.checkpoint("last")
    best = run.checkpoint("best")
    checkpoint = start.content
    trainer.fit_loop.load_state_dict(checkpoint["loops"]["fit_loop"])
    epochs: Any = trainer.fit_loop.epoch_progress.current
    epochs.completed = epochs.processed  # it is one less in a checkpoint at the end of an epoch
    is_stale = not best.exists() or best.stat().st_mtime < last.stat().st_mtime
    if (
        is_stale
        and checkpoint["callbacks"]["Checkpoints"]["highest"] is None
        and trainer.is_global_zero
    ):
        link(last, best)
