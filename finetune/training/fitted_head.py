"""Fits the head of a network on the features of the training images, before the first step, and measures it."""

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl

from finetune.settings.schema import HeadInit
from finetune.training.add_familiarity import find_familiarity
from finetune.training.calibration import Calibration
from finetune.training.loss import target_of
from finetune.training.outputs import collect

if TYPE_CHECKING:  # scipy takes a second to import
    from finetune.features.linear_probe import FittedHead

log = logging.getLogger(__name__)

_SOLVED = (
    "the backbone is frozen, so the head is solved exactly, as the logistic regression on its features: %s. "
    "Epochs, learning rate and augmentation have no effect"
)
_BEGINS = "the head begins as the logistic regression on its features: %s"


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


class FitHead(pl.Callback):
    """Sets the head of a `Classifier` to a logistic regression, for `--model.head_init probe` and a frozen backbone.

    A fit that starts from a checkpoint keeps the head of the checkpoint. If more than the head is trained, the weights
    are validated before the first step: they are a candidate for best.ckpt.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.ckpt_path is not None:
            return
        from finetune.features.linear_probe import probe_head

        pl_module.eval()
        data = trainer.datamodule  # type: ignore[attr-defined]
        fitted = probe_head(trainer, pl_module, data)
        if pl_module.trains_from_fitted_head and "val" in data.splits:
            _validate(trainer, pl_module, data.loader("val", is_limited=True))
        if pl_module.is_solved and trainer.is_global_zero:
            pl_module.familiarity = find_familiarity(
                trainer, pl_module, data, (fitted.features, fitted.labels)
            )
        pl_module.train()
        if not trainer.is_global_zero:
            return
        log.info(_SOLVED if pl_module.is_solved else _BEGINS, fitted.describe())
        if pl_module.is_solved:
            _measure(pl_module, fitted)


def _validate(trainer: pl.Trainer, model: Any, batches: Iterable[Mapping[str, Any]]) -> None:
    """Measure the weights before training, and fit their calibration, on the validation images of all ranks."""
    outputs = collect(trainer, model, batches).gather(trainer)
    score = None
    if outputs is not None and len(outputs.labels):
        score = model.task.score(outputs.logits, outputs.labels)
        model.calibration = Calibration.fit(outputs.logits, outputs.labels, model.aim)
    model.start_score = trainer.strategy.broadcast(score)


def _measure(model: Any, fitted: "FittedHead") -> None:
    """Update the training metrics with the solved head's logits of the training images."""
    batch = {"label": fitted.labels}
    if fitted.weights is not None:
        batch["weight"] = fitted.weights
    target = target_of(batch)
    class_weight = model.class_weight.double().cpu()
    summed = model.task.loss_sum(fitted.logits, target, class_weight)
    weight = target.weight(class_weight)
    model.train_metrics.update(fitted.logits, fitted.labels, summed, weight)
