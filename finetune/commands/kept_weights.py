"""After training: choose between the weights of a fit's start, those of its best epoch, and a mean of both."""

import json
import logging
import time
from typing import Any

from pytorch_lightning import Trainer

from finetune.data.datamodule import ImageDataModule
from finetune.models.stages import batch_norms
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.folder import Run
from finetune.runs.interpolation_record import FILE
from finetune.system.files import replace_text
from finetune.training.classifier import Classifier
from finetune.training.interpolation import ENDS, SHARES, settle

log = logging.getLogger(__name__)


def is_settled(trainer: Trainer, data: ImageDataModule, run: Run) -> bool:
    """Return whether nothing is left to choose.

    That is so if there is nothing to choose on, if the run did not start from a fitted head, or if the choice was made
    and recorded.
    """
    if "val" not in data.splits or trainer.limit_val_batches == 0:
        return True
    start, best = run.checkpoint("start"), run.checkpoint("best")
    if not start.exists() or not best.exists():
        return True
    return (
        run.file(FILE).exists()
        and read_checkpoint(best)["finetune"].get("interpolation") is not None
    )


def keep_best_weights(trainer: Trainer, model: Classifier, data: ImageDataModule, run: Run) -> None:
    """Replace the weights of best.ckpt by the choice between start.ckpt and best.ckpt on the validation images.

    Rank 0 measures the candidates alone. A run that was killed before this step does it when it is resumed, before the
    processes of other devices are started.

    Args:
        trainer: Its device, precision and limit of validation batches are used.
        model: Its weights change.
        data: Its validation images are measured; without any nothing changes.
        run: The run, trained to its end.
    """
    if is_settled(trainer, data, run):
        return
    if trainer.is_global_zero:
        plain = read_checkpoint(run.checkpoint("best"))["finetune"].get("interpolation")
        if plain is None:
            plain = _replace(trainer, model, data, run)
        # Last: a run that ends between the two has no record of weights that best.ckpt does not hold.
        replace_text(run.file(FILE), json.dumps(plain, indent=2) + "\n")
    trainer.strategy.barrier("best.ckpt with the kept weights")


def _replace(
    trainer: Trainer, model: Classifier, data: ImageDataModule, run: Run
) -> dict[str, Any]:
    """Replace the weights of best.ckpt; return what was chosen, in plain values."""
    began = time.monotonic()
    best = read_checkpoint(run.checkpoint("best"))
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
        batches=data.loader("val", is_limited=True, is_alone=True),
        shares=ENDS if _has_trained_statistics(model) else SHARES,
        aim=model.calibrator.aim,
    )
    best["state_dict"] = weights
    best["finetune"]["calibration"] = calibration.as_plain()
    best["finetune"]["interpolation"] = interpolation.as_plain()
    trainer.strategy.checkpoint_io.save_checkpoint(best, run.checkpoint("best"))
    seconds = time.monotonic() - began
    log.info(
        "the start and the end of training were compared on the validation images in %.1f s",
        seconds,
    )
    return interpolation.as_plain()


def _has_trained_statistics(model: Classifier) -> bool:
    """Return whether training changed the statistics of any batch norm."""
    fixed = {id(module) for part in model.always_eval for module in part.modules()}
    return any(id(norm) not in fixed for norm in batch_norms(model.network))
