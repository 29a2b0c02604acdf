"""What `--resume` goes on with: which run, whether anything is left to do, and what may have changed since."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import yaml
from jsonargparse import Namespace

from finetune import public_paths
from finetune.data.datamodule import ImageDataModule
from finetune.runs.best_epoch import highest_of
from finetune.runs.changes import compared
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.exported_files import ExportedCheckpoint
from finetune.runs.folder import Run, RunFolder, newest_but_tries, newest_with_checkpoint, not_looked_at
from finetune.runs.lightning_callbacks import ended_by
from finetune.runs.metrics_csv import MetricsCSV
from finetune.runs.run_lock import check_free, hold
from finetune.runs.run_logger import RunLogger
from finetune.system.files import link
from finetune.system.messages import WrongUsage, reason

log = logging.getLogger(__name__)


class Beginning(NamedTuple):
    """How a fit begins.

    Attributes:
        run: The run to go on in; None for a new one.
        checkpoint: What it begins with.
        finished: The limit that the run has reached, "" for none.
        told: Why `--resume` begins a new run, in words; "" where it goes on in one.
    """

    run: Path | None
    checkpoint: Path | str | None
    finished: str = ""
    told: str = ""


def beginning(trainer: pl.Trainer, root: Path, resume: bool, ckpt_path: str | None) -> Beginning:
    """Return how a fit begins.

    Args:
        trainer: Its limits and callbacks count alone.
        root: Where runs are.
        resume: Whether to go on in the newest run that has a `last.ckpt`, if there is one.
        ckpt_path: What to begin with otherwise, if anything.

    Raises:
        ValueError: `ckpt_path` leaves nothing to do, or another process has begun a run that `resume` would go on in.
    """
    newest = newest_with_checkpoint(root) if resume else None
    begun = newest_but_tries(root) if resume else None  # perhaps on its way to its first checkpoint
    if begun and begun != newest:
        # Of a run's own processes the first makes its folder when all of them have come past this line.
        check_free(begun)
    first = newest / "checkpoints/last.ckpt" if newest else ckpt_path
    checkpoint = None if first is None else read_checkpoint(first)
    if isinstance(checkpoint, ExportedCheckpoint):
        raise WrongUsage(f"{first} is an exported file, from which nothing can go on: give the checkpoint")
    finished = ended_by(checkpoint, trainer) if checkpoint else ""
    if newest and finished and newest != begun:
        # That later one is meant, not the one finished before it.
        told = f"{newest} is finished, with {finished}, and {begun} ended before its first checkpoint: a new run begins"
        return beginning(trainer, root, resume=False, ckpt_path=ckpt_path)._replace(told=told)
    if finished and not newest:
        raise ValueError(
            f"{first} leaves nothing to train, with {finished}: raise that limit, or measure the checkpoint by "
            f"finetune test {first}"
        )
    return Beginning(newest, first, finished, _not_found(root) if resume and not newest else "")


def go_on(trainer: pl.Trainer, run: Run, data: ImageDataModule, options: Namespace) -> None:
    """Make a run's folder ready for its next steps, and say what has changed.

    Args:
        trainer: Its callbacks and loggers are those of the run.
        run: The run, whose folder is known.
        data: The pictures of this command.
        options: What `fit` was given; what the checkpoint decides is put in its place.

    Raises:
        ValueError: Something has changed that can't.
    """
    if trainer.is_global_zero:
        hold(run.checkpoint("last").parents[1])
    folder = next(c for c in trainer.callbacks if isinstance(c, RunFolder))  # type: ignore[attr-defined]
    path, checkpoint = run.file("config.yaml"), read_checkpoint(run.checkpoint("last"))
    try:
        before = public_paths(yaml.safe_load(path.read_text("utf-8"))) if path.exists() else {}
    except (ValueError, yaml.YAMLError) as error:
        told = f"{path} is damaged: {reason(error)}; move it away, and --resume goes on without it"
        raise ValueError(told) from error
    known = checkpoint["finetune"]
    # An older version's checkpoint has a fingerprint of another kind, and no record; that is told where it is read.
    has_other_pictures = bool(known.get("seen")) and known["data_fingerprint"] != data.fingerprint
    told, held = compared(before, yaml.safe_load(folder.text()), has_other_pictures, options.allow_changes)
    for key, value in held.items():
        options[key] = value
    run.began_from, run.licence = known.get("began_from"), known.get("licence_of_the_weights")
    if trainer.is_global_zero:
        others = [other for other in not_looked_at(run.root) if _written(other) > _written(run.path or other)]
        told = f"; {told}" if told else ""
        told += "".join(f"; {other} is newer, but not called version_N" for other in others)
        log.info("going on in %s from step %d%s", run.path, checkpoint["global_step"], told)
    for logger in trainer.loggers:
        if isinstance(logger, (MetricsCSV, RunLogger)):
            logger.rewind(checkpoint["global_step"])


def take_up(trainer: pl.Trainer, run: Run) -> None:
    """Let a trainer stand where a finished run has ended, so that its test is logged there, and see to its best.ckpt.

    Without validation that is last.ckpt; a process that was killed may not have come to say so.
    """
    last, best = run.checkpoint("last"), run.checkpoint("best")
    checkpoint = read_checkpoint(last)
    trainer.fit_loop.load_state_dict(checkpoint["loops"]["fit_loop"])
    epochs: Any = trainer.fit_loop.epoch_progress.current
    epochs.completed = epochs.processed  # written at an epoch's end, it lags
    is_stale = not best.exists() or best.stat().st_mtime < last.stat().st_mtime
    if is_stale and highest_of(checkpoint["callbacks"]["Checkpoints"]) is None and trainer.is_global_zero:
        link(last, best)


def _not_found(root: Path) -> str:
    others = "".join(f"; {run} is not called version_N" for run in not_looked_at(root))
    where = (root / "fit").resolve()
    return f"--resume found nothing to go on with in {where}/version_N/checkpoints/last.ckpt: a new run begins{others}"


def _written(run: Path) -> float:
    return (run / "checkpoints/last.ckpt").stat().st_mtime
