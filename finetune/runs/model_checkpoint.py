"""Decides when checkpoints are written, such that training can be resumed exactly from each of them."""

import logging
import math
import time
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.plugins.io import CheckpointIO

from finetune import lightning_private
from finetune.data.samplers import evaluated_targets
from finetune.distributed.signals import Interrupted, SignalFlag
from finetune.runs.background_writer import BackgroundWriter, ByName
from finetune.runs.best_epoch import lowest_acceptable
from finetune.runs.folder import Run
from finetune.runs.headline import Best, best_of_epoch
from finetune.runs.metrics_csv import MetricsCSV
from finetune.system.files import link

log = logging.getLogger(__name__)


class Checkpoints(Checkpoint):
    """Writes `last.ckpt` and `best.ckpt`, and ends the fit by `--patience` or a signal.

    - `last.ckpt`: at the end of each epoch, every n steps, at a signal, and where a limit ends the run inside an epoch.
    - `best.ckpt`: after a validation within one standard error of the highest value of the monitored metric
      (`best_epoch`). A fit that starts from a fitted head is validated before its first step. In any other
      fit, `best.ckpt` equals `last.ckpt` until the first validation.

    Checkpoints at the ends of epochs are written in the background. Training waits for the others.

    Lightning can resume after a batch, inside a validation, after a validation, and at the end of an epoch. After the
    last batch of an epoch, or a batch before a validation, it would skip that validation. A checkpoint that is due
    there is written after the validation. Between accumulated batches nothing is written and nothing stops, since
    checkpoints do not contain gradients. If the loss or the weights are not finite after a step, nothing is written.

    Args:
        run: The run.
        every_n_steps: Optimizer steps between checkpoints inside an epoch; None for none.
        patience: Validations without improvement after which the fit ends; None for no limit.

    Attributes:
        signal: The signal that this process has received.
        stopped_by: The signal on which all ranks agree after training has ended.
        highest: Highest value of the monitored metric.
        num_waited: Number of validations since then.
    """

    def __init__(
        self, run: Run, every_n_steps: int | None = None, patience: int | None = None
    ) -> None:
        self.run = run
        self.every_n_steps = every_n_steps
        self.patience = patience
        self.signal = SignalFlag()
        self.stopped_by = 0
        self.highest: float | None = None
        self.num_waited = 0
        self._io: CheckpointIO | None = None
        self._writer = BackgroundWriter(self._write)
        self._is_due = False  # whether last.ckpt must be written at the next possible point
        self._best: Best | None = None  # the record of the last validation, if it is acceptable
        self._epoch_began = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"highest": self.highest, "num_waited": self.num_waited}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.highest = state_dict["highest"]
        self.num_waited = state_dict["num_waited"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.strategy.broadcast(self.run.checkpoint("best").exists()):
            # they were those of another run, from whose checkpoint this one starts
            self.highest = None
            self.num_waited = 0
        self._io = trainer.strategy.checkpoint_io
        self._epoch_began = time.monotonic()  # for a run that is resumed inside an epoch
        score = getattr(pl_module, "start_score", None)
        if trainer.ckpt_path is None and score is not None:
            self._best = self._judge(trainer, score, epoch=0)
            self._save(trainer, "best")
        self.signal.join(trainer)
        self.signal.install()  # here, since Lightning installs its own handlers just before

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self.run.sync.check()
        if lightning_private.is_accumulating(trainer):
            return
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            self._is_due = True
        is_validated = "val" in trainer.datamodule.splits  # type: ignore[attr-defined]
        is_next = is_validated and lightning_private.is_validation_next(trainer)
        if _is_last_batch(trainer) or is_next:
            return
        signum = self.signal.agreed(trainer)
        if signum or self._is_due or _ends(trainer):
            _write_ahead(trainer)
            self._save(trainer, "last", is_waited=bool(signum))
        if signum:
            lightning_private.log_batch(trainer)
            raise Interrupted(signum)

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.state.fn != "fit" or _ends(trainer):
            return
        if signum := self.signal.agreed(trainer):
            # Reset the progress, so that a resumed run repeats the validation from its first image.
            progress: Any = trainer.fit_loop.epoch_loop.val_loop.batch_progress
            progress.reset_on_run()
            progress.total.reset()
            progress.total.ready = progress.total.started = 1
            self._save(trainer, "last", is_waited=True)
            raise Interrupted(signum)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        check_finite(trainer, "train/loss", "val/loss")
        module: Any = pl_module
        value = float(trainer.callback_metrics[module.task.monitor])
        self._best = self._judge(trainer, value, trainer.current_epoch + 1)
        if self.patience is not None and self.num_waited >= self.patience:
            trainer.should_stop = True
        if _is_last_batch(trainer):
            return  # written at the end of the epoch
        is_last = self._is_due or _ends(trainer)
        if self._best is not None or is_last:
            self._save(trainer, *self._names(is_last))

    def _judge(self, trainer: pl.Trainer, value: float, epoch: int) -> Best | None:
        """Update the highest value after a validation, and return the record of best.ckpt if it is to be written."""
        module: Any = trainer.lightning_module
        task = module.task
        if math.isnan(value):  # of several labels, if no image with a label can be decoded
            value = 0.0
        if self.highest is None or value > self.highest:
            self.highest = value
            self.num_waited = 0
        else:
            self.num_waited += 1
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        targets = data.splits["val"].targets
        measured = evaluated_targets(targets, trainer.limit_val_batches, data.batch_size)
        num_trials = task.num_trials(measured)
        if value < lowest_acceptable(self.highest, num_trials):
            return None
        return best_of_epoch(
            epoch=epoch,
            value=value,
            highest=self.highest,
            monitor=task.monitor,
            num_images=len(measured),
            num_trials=num_trials,
        )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_finite(trainer, "train/loss_epoch")
        _write_ahead(trainer, is_epoch_end=True)
        for logger in _files(trainer):
            seconds = time.monotonic() - self._epoch_began
            logger.log_epoch(trainer.current_epoch + 1, trainer.global_step, seconds)
        # else a limit has ended the run inside the epoch, and last.ckpt is written
        if _is_last_batch(trainer):
            self._save(trainer, *self._names(is_last=True))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Signals since the last batch. By now the epoch's metrics are logged.
        if signum := self.signal.agreed(trainer):
            self._finish(trainer)
            raise Interrupted(signum)
        self._epoch_began = time.monotonic()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._finish(trainer)
        self.stopped_by = self.signal.agreed(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.signal.restore()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        try:
            self._writer.finish()
        except Exception as error:  # only logged, so that the first error is the one that is raised
            log.warning("what was trained since the last checkpoint is lost: %s", error)
        self.signal.restore()

    def _names(self, is_last: bool) -> list[str]:
        """Return the names of the checkpoint after a validation, or at the end of an epoch."""
        names = [] if self._best is None else ["best"]
        return [*names, "last"] if is_last else names

    def _save(self, trainer: pl.Trainer, *names: str, is_waited: bool = False) -> None:
        """Write a checkpoint.

        Args:
            trainer: The trainer.
            names: Its names.
            is_waited: Whether to wait until it is written. This is also the case if it is due by `every_n_steps`.
        """
        # These synchronize with a GPU, which writing the weights does anyway.
        check_finite(trainer, "train/loss")
        check_weights(trainer)
        if "last" in names:
            is_waited = is_waited or self._is_due
            self._is_due = False
            if self.highest is None:
                names = ("best", "last")
        checkpoint = lightning_private.dump_checkpoint(trainer)  # all ranks take part
        if trainer.is_global_zero:
            self._writer.put(names, checkpoint, self._best)
            if self.run.sync.is_active:  # which takes longer than writing
                self._writer.finish()
                self.run.sync.push()
        self._best = None
        if is_waited:
            self._finish(trainer)

    def _finish(self, trainer: pl.Trainer) -> None:
        """Let all ranks wait until all checkpoints are written, and begin to upload them."""
        if trainer.is_global_zero:
            self._writer.finish()
            self.run.sync.push()
        # All ranks read best.ckpt for the test. At a signal, the launcher could end rank 0 once another rank has ended.
        trainer.strategy.barrier("checkpoints")

    def _write(self, checkpoints: ByName) -> None:
        """Write checkpoints on rank 0.

        A best.ckpt comes before the last.ckpt, since `--resume` would not reach its epoch again. Without the last.ckpt,
        it does.
        """
        assert self._io is not None, "there are no checkpoints before training"
        best = checkpoints.get("best")
        for name in ("best", "last"):
            item = checkpoints.get(name)
            if item is None:
                continue
            if name == "last" and item is best:
                link(self.run.checkpoint("best"), self.run.checkpoint("last"))
            else:
                before = self.run.forget_best if name == "best" else None
                self._io.save_checkpoint(item.content, self.run.checkpoint(name), before)
            if name == "best" and item.record is not None:
                self.run.dir.update(best=item.record)


def _is_last_batch(trainer: pl.Trainer) -> bool:
    return trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


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


def gentler_training(trainer: pl.Trainer) -> str:
    """Return what to set where training breaks a network: a wider precision, or a lower rate than the full ones."""
    if str(trainer.precision) == "16-true":
        return "--precision 32-true or bf16-mixed, since 16-true has no numbers above 65,504"
    # a schedule changes `lr`, to 0 after its last step
    groups = trainer.optimizers[0].param_groups
    rates = dict.fromkeys(f"{group.get('initial_lr', group['lr']):.3g}" for group in groups)
    return f"a lower --lr (its full rates: {', '.join(rates)})"
