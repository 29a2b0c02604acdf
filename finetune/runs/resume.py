"""The checkpoint from which a fit starts: that of the run that `--resume` continues, or that of `--ckpt_path`."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl

from finetune.data.datamodule import ImageDataModule
from finetune.runs.best_epoch import highest_of
from finetune.runs.changes import compared
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.exported_files import ExportedCheckpoint
from finetune.runs.folder import Run, last_checkpoint, not_looked_at
from finetune.runs.lightning_callbacks import Limits, ended_by
from finetune.runs.metrics_csv import MetricsCSV
from finetune.runs.run_lock import hold
from finetune.runs.run_logger import RunLogger
from finetune.system.files import link
from finetune.system.messages import WrongUsage

log = logging.getLogger(__name__)

# What a fit writes next to the weights, and reads when it continues.
PROGRESS = ("epoch", "global_step", "loops", "callbacks", "optimizer_states", "lr_schedulers")


def is_of_data(run: Path, data: ImageDataModule, allow_changes: bool) -> bool:
    """Return whether a run was trained on these images; if changes are allowed, on any images of the same classes."""
    checkpoint = read_checkpoint(last_checkpoint(run))
    if checkpoint["hyper_parameters"]["class_names"] != data.class_names:
        return False
    return allow_changes or not _has_other_pictures(checkpoint, data)


class Changes(NamedTuple):
    """The settings of a run that is resumed, and of the command that resumes it.

    Attributes:
        before: The content of the run's config.yaml.
        now: The same of the command, before settings of the run replace some.
    """

    before: dict[str, Any]
    now: dict[str, Any]


class Beginning(NamedTuple):
    """Where a fit starts.

    Attributes:
        checkpoint: Its first checkpoint; None for none.
        finished: The limit that the resumed run has reached, in words; "" for none.
    """

    checkpoint: Path | str | None
    finished: str = ""


def beginning(trainer: pl.Trainer, resumed: Path | None, ckpt_path: str | None) -> Beginning:
    """Return where a fit starts.

    Args:
        trainer: Only its limits and callbacks are read.
        resumed: The run to resume; None for a new one.
        ckpt_path: The checkpoint from which a new run starts, if any.

    Raises:
        ValueError: The checkpoint at `ckpt_path` has reached a limit of the trainer.
    """
    first = last_checkpoint(resumed) if resumed else ckpt_path
    if first is None:
        return Beginning(None)
    checkpoint = read_resumable(first)
    finished = ended_by(checkpoint, Limits.of(trainer))
    if finished and not resumed:
        raise ValueError(
            f"{first} leaves nothing to train, with {finished}: raise that limit, or measure the checkpoint by "
            f"finetune test {first}"
        )
    return Beginning(first, finished)


def read_resumable(path: Path | str) -> dict[str, Any]:
    """Return the content of a checkpoint from which training can continue.

    Raises:
        ValueError: It is an exported file, or lacks what a fit writes next to the weights.
    """
    checkpoint = read_checkpoint(path)
    if isinstance(checkpoint, ExportedCheckpoint):
        raise WrongUsage(
            f"{path} is an exported file, from which nothing can go on: give the checkpoint"
        )
    missing = [name for name in PROGRESS if name not in checkpoint]
    is_solved = checkpoint["hyper_parameters"].get("freeze") == "backbone"  # without an optimizer
    if not missing and not checkpoint["optimizer_states"] and not is_solved:
        missing = ["optimizer_states"]
    if missing:
        hint = f"begin a new run with its weights: --weights {path}"
        raise ValueError(
            f"training cannot continue from {path}, which has no {', '.join(missing)}: {hint}"
        )
    return checkpoint


def check_changes(
    run: Run, data: ImageDataModule, changes: Changes, allow_changes: bool, is_finished: bool
) -> str:
    """Return what has changed since a run began, in words; "" for nothing.

    Raises:
        ValueError: Something has changed that must not change.
    """
    checkpoint = read_checkpoint(run.checkpoint("last"))
    names = checkpoint["hyper_parameters"]["class_names"]
    if names != data.class_names:
        raise ValueError(
            f"{run.path} is of the classes {', '.join(names)}, and {data.root} holds {', '.join(data.class_names)}: "
            "begin a new run without --resume"
        )
    has_other_pictures = _has_other_pictures(checkpoint, data)
    told, _ = compared(changes.before, changes.now, has_other_pictures, allow_changes, is_finished)
    return told


def go_on(trainer: pl.Trainer, run: Run, told: str) -> None:
    """Make a run's folder ready for its next steps, and say what has changed.

    Args:
        trainer: Its callbacks and loggers are those of the run.
        run: The run, whose folder is known.
        told: The message of `check_changes`.
    """
    if trainer.is_global_zero:
        hold(run.checkpoint("last").parents[1])
    checkpoint = read_checkpoint(run.checkpoint("last"))
    known = checkpoint["finetune"]
    run.began_from, run.licence = known.get("began_from"), known.get("licence_of_the_weights")
    if trainer.is_global_zero:
        others = [
            other
            for other in not_looked_at(run.root)
            if _written(other) > _written(run.path or other)
        ]
        told = f"; {told}" if told else ""
        told += "".join(f"; {other} is newer, but not called version_N" for other in others)
        log.info("going on in %s from step %d%s", run.path, checkpoint["global_step"], told)
    for logger in trainer.loggers:
        if isinstance(logger, (MetricsCSV, RunLogger)):
            logger.rewind(checkpoint["global_step"])


def take_up(trainer: pl.Trainer, run: Run) -> None:
    """Set a trainer's progress to that of a finished run, so that its test is logged there, and complete best.ckpt.

    Without validation best.ckpt is last.ckpt. A process that was killed may not have linked it yet.
    """
    last, best = run.checkpoint("last"), run.checkpoint("best")
    checkpoint = read_checkpoint(last)
    trainer.fit_loop.load_state_dict(checkpoint["loops"]["fit_loop"])
    epochs: Any = trainer.fit_loop.epoch_progress.current
    epochs.completed = epochs.processed  # in a checkpoint of an epoch's end it lags behind
    is_stale = not best.exists() or best.stat().st_mtime < last.stat().st_mtime
    if (
        is_stale
        and highest_of(checkpoint["callbacks"]["Checkpoints"]) is None
        and trainer.is_global_zero
    ):
        link(last, best)


def _has_other_pictures(checkpoint: Mapping[str, Any], data: ImageDataModule) -> bool:
    known = checkpoint["finetune"]
    # A checkpoint of an earlier version has a fingerprint of another kind, and no record; `data.seen` warns of that.
    return bool(known.get("seen")) and known["data_fingerprint"] != data.fingerprint


def _written(run: Path) -> float:
    return last_checkpoint(run).stat().st_mtime
