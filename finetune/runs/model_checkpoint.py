"""When checkpoints are written: always such that training can go on from them."""

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
from finetune.data.samplers import num_within
from finetune.distributed.signals import Interrupted, SignalFlag
from finetune.runs.best_epoch import highest_of, lowest_kept
from finetune.runs.deferred_checkpoints import DeferredCheckpoints
from finetune.runs.folder import Run
from finetune.runs.interpolation_record import FILE as KEPT_WEIGHTS
from finetune.runs.lightning_callbacks import Limits, Rates, enter_epoch, keep_patience
from finetune.runs.metrics_csv import MetricsCSV
from finetune.runs.predictions import FILES
from finetune.system.files import link
from finetune.system.messages import WrongUsage

log = logging.getLogger(__name__)


class Checkpoints(Checkpoint):
    """Writes `last.ckpt` at epochs' ends, every n steps and on a signal, `best.ckpt` after validation.

    Where epochs are short not at each one's end (`deferred_checkpoints`). A fit that starts from a fitted head keeps
    that as `start.ckpt`.

    Best is the latest validation within a standard error of the highest val/accuracy (`best_epoch`); without a
    validation split best is last.

    Lightning can go on from four points: after a batch inside an epoch, inside a validation, after one, and at an
    epoch's end. After the last batch of an epoch, or one that validation follows, it would skip that validation: what
    is due there is written after it. Between accumulated batches nothing is written and nothing stops, since their
    gradients are in no checkpoint. A run that a limit ends inside an epoch keeps the `last.ckpt` of that moment, from
    which it can be prolonged. Of a step whose loss or weights are no numbers none is written.
    """

    def __init__(self, run: Run, every_n_steps: int | None = None) -> None:
        check_interval(every_n_steps)
        self.run, self.every_n_steps = run, every_n_steps
        self.signal, self._deferred = SignalFlag(), DeferredCheckpoints()
        self.highest: float | None = None  # of the monitored metric
        self._is_due = self._is_best = False
        # of a run that a callback has stopped, not a signal
        self.limits: dict[str, Any] | None = None
        # the limits with which a callback wants a stop, perhaps later
        self.wanted: dict[str, Any] | None = None
        self._is_stop_held = self._is_of_another = False
        self._epoch_began, self._is_extra_pass = 0.0, False
        self.stopped_by = 0  # the signal that all devices agree on once training has ended

    def state_dict(self) -> dict[str, Any]:
        stop = {"is_stopped": self.limits is not None, "limits": self.limits, "wanted": self.wanted}
        return {"highest": self.highest, **stop}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.highest, self.wanted = highest_of(state_dict), state_dict.get("wanted")

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any
    ) -> None:
        # --ckpt_path
        self._is_of_another = str(trainer.ckpt_path) != str(self.run.checkpoint("last"))
        keep_patience(checkpoint, trainer, self._is_of_another and trainer.state.fn == "fit")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        has_best = trainer.strategy.broadcast(self.run.checkpoint("best").exists())
        if not has_best:
            self.highest = None  # that of another run, whose --ckpt_path this one began from
        if self._is_of_another:
            self.wanted = None
        # A stop that `min_epochs` has put off; where a limit was changed since, callbacks are to want it anew.
        trainer.should_stop |= (
            self.wanted is not None and self.wanted == Limits.of(trainer).as_plain()
        )
        self._epoch_began = time.monotonic()  # of one that is entered in the middle
        if trainer.ckpt_path is None and getattr(pl_module, "trains_from_fitted_head", False):
            self._save(trainer, "start")
        enter_epoch(trainer)
        self.signal.join(trainer)
        self.signal.install()  # here, since Lightning installs its own just before

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        loop = trainer.fit_loop.epoch_loop
        if self._is_accumulating(trainer) or lightning_private.is_extra_pass(trainer):
            return
        self._is_due |= (
            bool(self.every_n_steps) and trainer.global_step % (self.every_n_steps or 1) == 0
        )
        is_validated = "val" in trainer.datamodule.splits  # type: ignore[attr-defined]
        is_next = is_validated and lightning_private.is_validation_next(trainer)
        if loop.batch_progress.is_last_batch or is_next:
            return
        self._is_due |= _ends(trainer)
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
        is_extra = lightning_private.is_extra_pass(trainer)
        if lightning_private.is_accumulating(trainer) or is_extra or _ends(trainer):
            return  # it stops after the next step, or with the run
        if signum := self.signal.agreed(trainer):
            # Written as if validation had just begun, so that it is done again from its first picture.
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
        self.highest = value if self.highest is None else max(value, self.highest)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        num_images = num_within(trainer.limit_val_batches, len(data.splits["val"]), data.batch_size)
        is_best = value >= lowest_kept(self.highest, num_images, pl_module.task.standard_error)
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._is_best = is_best  # written once for both, as the epoch ends
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
            # A longer run has no validation here and counts the batch at once.
            counting = nullcontext() if is_regular else lightning_private.counted_as_logged(trainer)
            with counting:
                self._save(trainer, "last")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_finite(trainer, "train/loss_epoch")
        _write_ahead(trainer, is_epoch_end=True)
        if not self._is_extra_pass:
            for logger in _files(trainer):
                rates = next((c.last for c in trainer.callbacks if isinstance(c, Rates)), {})  # type: ignore[attr-defined]
                seconds = time.monotonic() - self._epoch_began
                logger.log_epoch(trainer.current_epoch + 1, trainer.global_step, seconds, rates)
        is_best, self._is_best = self._is_best, False
        names = (
            ("best", "last") if is_best else ("last", "best") if self.highest is None else ("last",)
        )
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._save(trainer, *names, may_wait=True)
        elif (
            self.highest is None and trainer.is_global_zero
        ):  # a limit has ended it, and its last.ckpt is there
            self._forget_results_of(["best"])
            link(self.run.checkpoint("last"), self.run.checkpoint("best"))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # What came since the last batch: `last.ckpt` is written, or waits, and the epoch's metrics are logged by now.
        if signum := self.signal.agreed(trainer):
            self._write_deferred(trainer)
            # or who starts the processes ends the first once another has ended
            trainer.strategy.barrier("last.ckpt")
            raise Interrupted(signum)
        self._epoch_began = time.monotonic()
        self._is_extra_pass = lightning_private.is_extra_pass(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write_deferred(trainer)
        trainer.strategy.barrier("best.ckpt")  # all devices read it for the test
        self.stopped_by = self.signal.agreed(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.signal.restore()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        try:
            self._write_deferred(trainer)
        except Exception as error:  # the first one is the news
            log.warning("what was trained since the last checkpoint is lost: %s", error)
        self.signal.restore()

    def _save(self, trainer: pl.Trainer, *names: str, may_wait: bool = False) -> None:
        """Write a checkpoint, under several names in their order: a kill between them leaves the later one old."""
        # a GPU is waited for, as for the weights that are written
        check_finite(trainer, "train/loss")
        check_weights(trainer)
        may_wait &= not self._is_due  # by `every_n_steps`
        if "last" in names:
            self._is_due = False
            self.wanted = Limits.of(trainer).as_plain() if trainer.should_stop else None
            is_stopped = self.wanted and lightning_private.may_stop(trainer)
            self.limits = self.wanted if is_stopped else None
        save: Callable[[Path], None] = trainer.save_checkpoint
        if may_wait and trainer.strategy.broadcast(self._deferred.may_wait()):
            checkpoint = lightning_private.dump_checkpoint(trainer)
            if not trainer.is_global_zero:
                return
            if self._deferred.hold(names, checkpoint):
                self._forget_results_of(names)
                return
            save = partial(trainer.strategy.checkpoint_io.save_checkpoint, checkpoint)
        # First a best that what --resume goes on from no longer leads to, or a last from which one leads to this best.
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
            save(first)  # what is spread over devices is brought together by all
            return
        self._forget_results_of(names)
        with self._deferred.timed(first, names):
            save(first)
        for other in others:
            link(first, other)

    def _forget_results_of(self, names: Sequence[str]) -> None:
        """Remove what a run that is prolonged has of another best.ckpt, if that is among the names.

        That is its test, and which weights between start and end it holds.
        """
        if "best" in names:
            for name in ("test.json", FILES["test"], KEPT_WEIGHTS):
                self.run.file(name).unlink(missing_ok=True)

    def _is_accumulating(self, trainer: pl.Trainer) -> bool:
        """Return whether gradients wait for their step; a stop that comes meanwhile waits for it, too."""
        is_waiting = lightning_private.is_accumulating(trainer)
        self._is_stop_held |= trainer.should_stop
        trainer.should_stop = self._is_stop_held and not is_waiting
        return is_waiting


def _ends(trainer: pl.Trainer) -> bool:
    """Return whether this step is the run's last one."""
    is_stopped = trainer.should_stop and lightning_private.may_stop(trainer)
    return is_stopped or 0 <= trainer.max_steps <= trainer.global_step


def _write_ahead(trainer: pl.Trainer, is_epoch_end: bool = False) -> None:
    for logger in _files(trainer):
        logger.write_ahead(trainer, is_epoch_end)


def _files(trainer: pl.Trainer) -> list[MetricsCSV]:
    return [logger for logger in trainer.loggers if isinstance(logger, MetricsCSV)]


def check_finite(trainer: pl.Trainer, *names: str) -> None:
    """Make sure that what was logged under some names are numbers.

    Raises:
        ValueError: One is infinite or none.
    """
    for name in names:
        value = float(trainer.callback_metrics.get(name, 0.0))
        if not math.isfinite(value):
            raise _diverged(trainer, f"{name} is {value}")


def check_weights(trainer: pl.Trainer) -> None:
    """Refuse, on all devices, what a step of finite loss may have made of the weights of any of them.

    Raises:
        ValueError: Some that learn are infinite or none.
    """
    learning = (p.detach() for p in trainer.lightning_module.parameters() if p.requires_grad)
    found = [parameter.isfinite().all() for parameter in learning]
    is_finite = not found or bool(torch.stack(found).all())  # a GPU is asked once
    if not trainer.strategy.reduce_boolean_decision(is_finite, all=True):
        raise _diverged(trainer, "some weights are no finite numbers")


def _diverged(trainer: pl.Trainer, text: str) -> ValueError:
    rates = ", ".join(f"{group['lr']:.3g}" for group in trainer.optimizers[0].param_groups)
    return ValueError(
        f"{text} in epoch {trainer.current_epoch + 1}: training has diverged; a lower "
        f"--model.optimizer.init_args.lr may help (the rates now: {rates}). No checkpoint has that step"
    )


def check_interval(every_n_steps: int | None) -> None:
    """Make sure that checkpoints can be written after every so many steps; None for the end of each epoch.

    Raises:
        WrongUsage: They cannot.
    """
    if every_n_steps is not None and every_n_steps < 1:
        raise WrongUsage(f"--checkpoint_every_n_steps must be at least 1, got {every_n_steps}")
