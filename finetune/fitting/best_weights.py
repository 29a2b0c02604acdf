"""After training: choose between the weights of a fit's start, those of its best epoch, and a mean of both."""

import logging
import time
from collections.abc import Mapping
from typing import Any

from pytorch_lightning import Trainer

from finetune.data.datamodule import ImageDataModule
from finetune.data.samplers import evaluated_targets
from finetune.models.stages import batch_norms
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.folder import Run
from finetune.runs.headline import Best, validation_headline
from finetune.runs.interpolation_record import Interpolation
from finetune.training.classifier import Classifier
from finetune.training.interpolation import ENDS, SHARES, settle

log = logging.getLogger(__name__)

_WEIGHTS = ("state_dict", "optimizer_states", "callbacks")  # the large sections of a checkpoint


def is_settled(trainer: Trainer, data: ImageDataModule, run: Run) -> bool:
    """Return whether nothing is left to choose.

    This is the case without validation images, if the run did not start from a fitted head, or if the choice was made
    and recorded.
    """
    if not _has_choice(trainer, data, run):
        return True
    if run.dir.facts.best is None:
        return False
    return _choice_in(read_checkpoint(run.checkpoint("best"))) is not None


def keep_best_weights(
    trainer: Trainer, model: Classifier, data: ImageDataModule, run: Run
) -> dict[str, Any] | None:
    """Replace the weights of best.ckpt by the choice between start.ckpt and best.ckpt on the validation images.

    Rank 0 measures the candidates alone. A run that was killed before this step does it when it is resumed, before the
    processes of other devices are started.

    Args:
        trainer: Its device, precision and limit of validation batches are used.
        model: Its weights change if there is a choice.
        data: Its validation images are measured; without any nothing changes.
        run: The run, trained to its end.

    Returns:
        The content of best.ckpt without weights and states, so that it need not be read again; None if there is no
        best.ckpt.
    """
    path = run.checkpoint("best")
    if not _has_choice(trainer, data, run):
        return _without_weights(read_checkpoint(path)) if path.exists() else None
    if trainer.is_global_zero:
        best = read_checkpoint(path)
        if _choice_in(best) is None:
            _replace(trainer, model, data, run, best)
        run.dir.update(best=_record(trainer, model, data, best))
    trainer.strategy.barrier("best.ckpt with the chosen weights")
    return _without_weights(best if trainer.is_global_zero else read_checkpoint(path))


def _without_weights(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in checkpoint.items() if name not in _WEIGHTS}


def _has_choice(trainer: Trainer, data: ImageDataModule, run: Run) -> bool:
    """Return whether a run has start.ckpt, best.ckpt and validation images to choose between them."""
    if "val" not in data.splits or trainer.limit_val_batches == 0:
        return False
    return run.checkpoint("start").exists() and run.checkpoint("best").exists()


def _record(
    trainer: Trainer, model: Classifier, data: ImageDataModule, best: Mapping[str, Any]
) -> Best:
    """Return the record of a best.ckpt in which the choice was made."""
    choice = Interpolation.from_plain(best["finetune"]["interpolation"])
    epoch = best["epoch"] + 1
    weights = choice.weights(epoch)
    targets = data.splits["val"].targets
    measured = evaluated_targets(targets, trainer.limit_val_batches, data.batch_size)
    num_trials = model.task.num_trials(measured)
    result = validation_headline(
        choice.metric, choice.chosen_score, choice.num_images, num_trials, weights
    )
    return Best(
        epoch=epoch, weights=weights, why=choice.message(epoch), share=choice.share, result=result
    )


def _choice_in(best: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the record of the choice in a best.ckpt; None if it was not made."""
    return best["finetune"].get("interpolation")


def _replace(
    trainer: Trainer, model: Classifier, data: ImageDataModule, run: Run, best: dict[str, Any]
) -> None:
    """Measure the candidates, and write best.ckpt with the weights of the chosen one.

    The arguments are those of `keep_best_weights`, and the content of best.ckpt, in which weights, calibration and the
    record of the choice are replaced.
    """
    began = time.monotonic()
    try:
        start = read_checkpoint(run.checkpoint("start"))
    except ValueError as error:
        hint = f"delete it, and finetune fit --resume {run.path} keeps the fine-tuned weights"
        raise ValueError(f"{error}; training is complete: {hint}") from error
    if data.trainer is None:
        data.trainer = trainer
    interpolation, weights, calibration = settle(
        trainer,
        model,
        start=start["state_dict"],
        end=best["state_dict"],
        batches=data.loader("val", is_limited=True, is_unsharded=True),
        shares=ENDS if _has_trained_statistics(model) else SHARES,
        aim=model.aim,
    )
    best["state_dict"] = weights
    best["finetune"]["calibration"] = calibration.as_plain()
    best["finetune"]["interpolation"] = interpolation.as_plain()
    checkpoint_io = trainer.strategy.checkpoint_io
    checkpoint_io.save_checkpoint(best, run.checkpoint("best"), run.forget_best)
    seconds = time.monotonic() - began
    log.info(
        "compared the weights before and after training on the validation images in %.1f s",
        seconds,
    )


def _has_trained_statistics(model: Classifier) -> bool:
    """Return whether training changed the statistics of any batch norm."""
    fixed = {id(module) for part in model.always_eval for module in part.modules()}
    return any(id(norm) not in fixed for norm in batch_norms(model.network))
