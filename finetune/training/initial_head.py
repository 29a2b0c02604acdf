"""The head that a fit starts with."""

import logging
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl

from finetune.data.datamodule import ImageDataModule
from finetune.settings.schema import HeadInit
from finetune.training.outputs import collect

if TYPE_CHECKING:  # scipy takes a second to import
    from finetune.features.linear_probe import FittedHead

log = logging.getLogger(__name__)

_SOLVED = (
    "the backbone is frozen, so the head is solved exactly, as the logistic regression on its features: %s. "
    "Epochs, learning rate and augmentation have no effect"
)


def resolved_head_init(head_init: HeadInit, weights: str | None) -> HeadInit:
    """Return how the head starts, with `auto` resolved.

    With a random head, the first steps of training distort pretrained features. A head that is fitted on them first
    prevents this (arXiv:2202.10054). It does not help with random weights.

    Args:
        head_init: The value of the user or of a checkpoint.
        weights: The pretrained weights; None for random ones.
    """
    if head_init != "auto":
        return head_init
    return "probe" if weights is not None else "xavier"


def fit_head(trainer: pl.Trainer, model: Any, data: ImageDataModule) -> "FittedHead":
    """Fit the head of a network on the features of the training images. Every rank must call this.

    Args:
        trainer: Its devices and precision are used.
        model: A `Classifier` in eval mode. Its head is changed.
        data: The images.
    """
    from finetune.features.linear_probe import probe_head

    return probe_head(trainer, model, data)


def score_of_head(trainer: pl.Trainer, model: Any, data: ImageDataModule) -> float | None:
    """Return the monitored metric on the validation images before training; None if nothing is validated.

    It is the same on all ranks, and every rank must call this.

    Args:
        trainer: Its devices and precision are used, and its limit of the validation batches.
        model: A `Classifier` in eval mode, with its fitted head.
        data: The images.
    """
    if "val" not in data.splits or trainer.limit_val_batches == 0:
        return None
    outputs = collect(trainer, model, data.loader("val", is_limited=True)).gather(trainer)
    score = None
    if outputs is not None and len(outputs.index):
        score = model.task.score(outputs.logits, outputs.labels)
    return trainer.strategy.broadcast(score)


def log_fitted_head(fitted: "FittedHead", start: str, is_solved: bool) -> None:
    """Log how the head was fitted.

    Args:
        fitted: The head.
        start: Its metric on the validation images, with its name; "" if there is none.
        is_solved: Whether nothing else trains.
    """
    if is_solved:
        log.info(_SOLVED, fitted.describe())
        return
    on_val = f", {start}" if start else ""
    message = "the head begins as the logistic regression on its features: %s%s"
    log.info(message, fitted.describe(), on_val)
