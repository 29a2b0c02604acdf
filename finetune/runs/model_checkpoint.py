"""Decides when checkpoints are written, such that training can be resumed exactly from each of them."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint

from finetune import lightning_private
from finetune.data.samplers import evaluated_targets
from finetune.distributed.signals import Interrupted, SignalFlag
from finetune.runs.best_epoch import lowest_acceptable
from finetune.runs.deferred_checkpoints import DeferredCheckpoints
from finetune.runs.folder import Run
from finetune.runs.headline import Best, best_of_epoch
from finetune.runs.lightning_callbacks import (
    Limits,
    Rates,
    gentler_training,
    keep_patience,
)
from finetune.runs.metrics_csv import MetricsCSV
from finetune.system.files import link

log = logging.getLogger(__name__)


class Checkpoints(Checkpoint):
    """Writes `last.ckpt`, `best.ckpt` and `start.ckpt`.

    - `last.ckpt`: at the end of each epoch, every n steps and on a signal. If epochs are short, it may be
      deferred (`deferred_checkpoints`).
    - `best.ckpt`: after a validation within one standard error of the highest value of the
      monitored metric (`best_epoch`). Without a validation split it is the same as `last.ckpt`.
    - `start.ckpt`: at the start of a fit that starts from a fitted head.

    Lightning can resume at four points: after a batch inside an epoch, inside a validation, after a
    validation, and at the end of an epoch. After the last batch of an epoch, or a batch before a
    validation, it would skip that validation. A checkpoint that is due there is written after the
    validation.

    Between accumulated batches nothing is written and nothing stops, since checkpoints do not contain
    gradients. A run that a limit ends inside an epoch keeps the `last.ckpt` of that moment, and can be
    continued from it. If the loss or the weights are not finite after a step, no checkpoint is written.
    """

    def __init__(self, run: Run, every_n_steps: int | None = None) -> None:
        self.run = run
        self.every_n_steps = every_n_steps
        self.signal = SignalFlag()
        self._deferred = DeferredCheckpoints()
        self.highest: float | None = None  # highest value of the monitored metric
        self._is_due = False  # whether last.ckpt must be written at the next possible point
        self._is_best = False
        self._best: Best | None = None  # of the newest validation that is to be kept
        # The limits of a run that a callback has stopped; None if none has.
        self.limits: dict[str, Any] | None = None
        self._is_stop_held = False  # whether a stop waits for the next optimizer step
        self._is_of_another = False  # whether the fit starts from the checkpoint of another run
        self._epoch_began = 0.0
        self.stopped_by = 0  # the signal on which all ranks agree after training has ended

    def state_dict(self) -> dict[str, Any]:
        stop = {"is_stopped": self.limits is not None, "limits": self.limits}
        return {"highest": self.highest, **stop}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.highest = state_dict["highest"]

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any
    ) -> None:
        # True with --ckpt_path.
        self._is_of_another = str(trainer.ckpt_path) != str(self.run.checkpoint("last"))
        keep_patience(checkpoint, trainer, self._is_of_another and trainer.state.fn == "fit")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        has_best = trainer.strategy.broadcast(self.run.checkpoint("best").exists())
        if not has_best:
            self.highest = None  # it was that of another run, from whose checkpoint this one starts
        self._epoch_began = time.monotonic()  # for a run that is resumed inside an epoch
        if trainer.ckpt_path is None and getattr(pl_module, "trains_from_fitted_head", False):
            self._save(trainer, "start")
        self.signal.join(trainer)
        self.signal.install()  # here, since Lightning installs its own handlers just before

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self.run.check_upload()
        loop = trainer.fit_loop.epoch_loop
        if self._is_accumulating(trainer):
            return
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            self._is_due = True
        is_validated = "val" in trainer.datamodule.splits  # type: ignore[attr-defined]
        is_next = is_validated and lightning_private.is_validation_next(trainer)
        if loop.batch_progress.is_last_batch or is_next:
            return
        if _ends(trainer):
            self._is_due = True
        signum = self.signal.agreed(trainer)
        if self._is_due or signum:
            _write_ahead(trainer)
            self._save(trainer, "last")
        if signum:
            lightning_private.log_batch(trainer)
            raise Interrupted(signum)

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        if lightning_private.is_accumulating(trainer) or _ends(trainer):
            return  # the signal is handled after the next step, or the run ends anyway
        if signum := self.signal.agreed(trainer):
            # Reset the progress, so that a resumed run repeats the validation from its first image.
            progress: Any = trainer.fit_loop.epoch_loop.val_loop.batch_progress
            progress.reset_on_run()
            progress.total.reset()
            progress.total.ready = progress.total.started = 1
            self._save(trainer, "last")
            raise Interrupted(signum)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        metrics = trainer.callback_metrics
        check_finite(trainer, "train/loss", "val/loss")
        value = float(metrics[pl_module.task.monitor])
        if math.isnan(value):  # of several labels, if no image with a label can be decoded
            value = 0.0
        self.highest = value if self.highest is None else max(value, self.highest)
        task = pl_module.task
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        targets = data.splits["val"].targets
        measured = evaluated_targets(targets, trainer.limit_val_batches, data.batch_size)
        num_trials = task.num_trials(measured)
        is_best = value >= lowest_acceptable(self.highest, num_trials, task.standard_error)
        if is_best:
            self._best = best_of_epoch(
                epoch=trainer.current_epoch + 1,
                value=value,
                highest=self.highest,
                monitor=task.monitor,
                num_images=len(measured),
                num_trials=num_trials,
            )
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._is_best = is_best  # written at the end of the epoch, together with last.ckpt
            return
        if is_best:
            self._save(trainer, "best")
        if self._is_accumulating(trainer):
            return
        if self._is_due or _ends(trainer):
            is_stopping = trainer.should_stop
            trainer.should_stop = False
            is_regular = lightning_private.is_validation_next(trainer)
            trainer.should_stop = is_stopping
            # A run with higher limits has no validation here, and counts the batch at once.
            counting = nullcontext() if is_regular else lightning_private.counted_as_logged(trainer)
            with counting:
                self._save(trainer, "last")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_finite(trainer, "train/loss_epoch")
        _write_ahead(trainer, is_epoch_end=True)
        for logger in _files(trainer):
            rates = next((c.last for c in trainer.callbacks if isinstance(c, Rates)), {})  # type: ignore[attr-defined]
            seconds = time.monotonic() - self._epoch_began
            logger.log_epoch(trainer.current_epoch + 1, trainer.global_step, seconds, rates)
        is_best = self._is_best
        self._is_best = False
        # In the order of writing: --resume would not reach the epoch of a last.ckpt again to write its best.ckpt.
        if is_best:
            names = ["best", "last"]
        elif self.highest is None:  # without validation both are the same
            names = ["last", "best"]
        else:
            names = ["last"]
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._save(trainer, *names, may_wait=True)
        elif self.highest is None and trainer.is_global_zero:
            # a limit has ended the run inside the epoch, and last.ckpt is written already
            self.run.forget_best()
            link(self.run.checkpoint("last"), self.run.checkpoint("best"))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Signals since the last batch. By now `last.ckpt` is written or deferred, and the epoch's metrics are logged.
        if signum := self.signal.agreed(trainer):
            self._write_deferred(trainer)
            # Without this barrier the launcher could end rank 0, which is writing, after another rank has ended.
            trainer.strategy.barrier("last.ckpt")
            raise Interrupted(signum)
        self._epoch_began = time.monotonic()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write_deferred(trainer)
        trainer.strategy.barrier("best.ckpt")  # all ranks read it for the test
        self.stopped_by = self.signal.agreed(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.signal.restore()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        try:
            self._write_deferred(trainer)
        except Exception as error:  # only logged, so that the first error is the one that is raised
            log.warning("what was trained since the last checkpoint is lost: %s", error)
        self.signal.restore()

    def _save(self, trainer: pl.Trainer, *names: str, may_wait: bool = False) -> None:
        """Write or defer a checkpoint.

        Args:
            trainer: The trainer.
            names: Names of the checkpoint, in the order of writing. After a kill in between, later ones are old.
            may_wait: Whether the checkpoint may be deferred.
        """
        # These synchronize with a GPU, which writing the weights does anyway.
        check_finite(trainer, "train/loss")
        check_weights(trainer)
        if self._is_due:  # by `every_n_steps`
            may_wait = False
        if "last" in names:
            self._is_due = False
            self.limits = Limits.of(trainer).as_plain() if trainer.should_stop else None
        save: Callable[[Path], None] = trainer.save_checkpoint
        if may_wait and trainer.strategy.broadcast(self._deferred.may_wait()):
            checkpoint = lightning_private.dump_checkpoint(trainer)
            if not trainer.is_global_zero:
                return
            if self._deferred.hold(names, checkpoint):
                return
            save = partial(trainer.strategy.checkpoint_io.save_checkpoint, checkpoint)
        # Deferred checkpoints come first. Before a new last.ckpt that is the deferred best.ckpt, since --resume would
        # not reach its epoch again. Before a new best.ckpt it is last.ckpt, from which --resume leads to this best.
        self._write_deferred(trainer, but=names if "last" in names else ())
        self._write(trainer, names, save)
        self._deferred.drop(names)

    def _write_deferred(self, trainer: pl.Trainer, but: Sequence[str] = ()) -> None:
        for names, checkpoint in self._deferred.take(but):
            self._write(
                trainer, names, partial(trainer.strategy.checkpoint_io.save_checkpoint, checkpoint)
            )

    def _write(
        self, trainer: pl.Trainer, names: Sequence[str], save: Callable[[Path], None]
    ) -> None:
        first, *others = (self.run.checkpoint(name) for name in names)
        if not trainer.is_global_zero:
            save(first)  # all ranks take part, since a state may be sharded over them
            return
        if "best" in names:
            self.run.forget_best()
        with self._deferred.timed(first, names):
            save(first)
        for other in others:
            link(first, other)
        if "best" in names and self._best is not None:
            self.run.dir.update(best=self._best.as_plain())
        self.run.send()

    def _is_accumulating(self, trainer: pl.Trainer) -> bool:
        """Return whether gradients are being accumulated. A stop that is asked for meanwhile waits for the step."""
        is_waiting = lightning_private.is_accumulating(trainer)
        if trainer.should_stop:
            self._is_stop_held = True
        trainer.should_stop = self._is_stop_held and not is_waiting
        return is_waiting


def _ends(trainer: pl.Trainer) -> bool:
    """Return whether this is the last step of the run."""
    return trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step


def _write_ahead(trainer: pl.Trainer, is_epoch_end: bool = False) -> None:
    for logger in _files(trainer):
        logger.write_ahead(trainer, is_epoch_end)


def _files(trainer: pl.Trainer) -> list[MetricsCSV]:
    return [logger for logger in trainer.loggers if isinstance(logger, MetricsCSV)]


def check_finite(trainer: pl.Trainer, *names: str) -> None:
    """Check that the metrics of these names are finite.

    Raises:
        ValueError: One is NaN or infinite.
    """
    for name in names:
        value = float(trainer.callback_metrics.get(name, 0.0))
        if not math.isfinite(value):
            raise _diverged(trainer, f"{name} is {value}")


def check_weights(trainer: pl.Trainer) -> None:
    """Check that the trainable weights are finite on all ranks. A step with a finite loss may break them.

    Raises:
        ValueError: Some weights of a rank are NaN or infinite. It is raised on all ranks.
    """
    trainable = (p.detach() for p in trainer.lightning_module.parameters() if p.requires_grad)
    checks = [parameter.isfinite().all() for parameter in trainable]
    is_finite = not checks or bool(torch.stack(checks).all())  # one synchronization with a GPU
    if not trainer.strategy.reduce_boolean_decision(is_finite, all=True):
        raise _diverged(trainer, "some weights are not finite numbers")


def _diverged(trainer: pl.Trainer, text: str) -> ValueError:
    return ValueError(
        f"{text} in epoch {trainer.current_epoch + 1}: training has diverged. Try {gentler_training(trainer)}. "
        "No checkpoint has that step"
    )
