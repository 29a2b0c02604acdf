"""Finds what tells how familiar an image is, and completes best.ckpt with it."""

from typing import Any

import numpy as np
import torch
from pytorch_lightning import Trainer
from torch import Tensor

from finetune.data.datamodule import ImageDataModule
from finetune.data.loader import end_workers
from finetune.data.samplers import evenly_spaced
from finetune.features.familiarity import (
    MOST_IMAGES,
    Familiarity,
    class_means,
    some_of_each_class,
)
from finetune.models.stages import head
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.folder import Run


def add_familiarity(trainer: Trainer, model: Any, data: ImageDataModule, run: Run) -> None:
    """Add the familiarity to best.ckpt, whose weights are final, if images have one class each and some validate.

    Rank 0 does this alone, so that the result does not depend on the number of devices. A run that was killed before
    does it when it is resumed. The checkpoints of a solved head have it already.

    Args:
        trainer: Its device and precision are used.
        model: A `Classifier`. On rank 0 it has the weights of best.ckpt afterwards.
        data: Some of its training images, prepared as in evaluation, and some of its validation images are used.
        run: The run, trained to its end.
    """
    path = run.checkpoint("best")
    if not _has_familiarity(trainer, model, data) or not path.exists():
        return
    if trainer.is_global_zero:
        best = read_checkpoint(path)
        if best["finetune"].get("familiarity") is None:
            data.trainer = data.trainer or trainer
            trainer.precision_plugin.convert_module(model)
            model.to(trainer.strategy.root_device).eval()
            model.load_state_dict(best["state_dict"])
            try:
                found = find_familiarity(trainer, model, data)
            finally:
                end_workers()
            best["finetune"]["familiarity"] = found and found.as_plain()
            trainer.strategy.checkpoint_io.save_checkpoint(best, path)
    trainer.strategy.barrier("best.ckpt with the familiarity")


def _has_familiarity(trainer: Trainer, model: Any, data: ImageDataModule) -> bool:
    """Return whether images have one class each, some validate, and the network tells its features."""
    is_validated = "val" in data.splits and trainer.limit_val_batches != 0
    return is_validated and model.task.label_kind == "single" and not model.is_compiled


def find_familiarity(
    trainer: Trainer,
    model: Any,
    data: ImageDataModule,
    train: tuple[Tensor, Tensor] | None = None,
) -> Familiarity | None:
    """Return the familiarity; None if there is none, features are not finite, or no image can be decoded.

    Args:
        trainer: Its device and precision are used.
        model: A `Classifier` in eval mode.
        data: Its images.
        train: The features (N, D) and the labels (N,) of all training images; None to compute some.
    """
    from finetune.features.linear_probe import head_inputs_of_rank  # imports scipy, which is slow

    if not _has_familiarity(trainer, model, data):
        return None

    def features(split: str, only: list[int]) -> tuple[Tensor, Tensor]:
        batches = data.loader(split, only=only)
        parts = head_inputs_of_rank(trainer, model, head(model.network), batches)
        x, y, _ = (torch.cat(column) for column in zip(*parts, strict=True))
        return x, y

    num_classes = len(model.class_names)
    if train is None:
        targets: Any = data.splits["train"].targets
        train = features("train", some_of_each_class(targets.labels, num_classes))
    means = class_means(*train, num_classes)
    num_val = len(data.splits["val"])
    num = min(num_val, MOST_IMAGES)
    x, _ = features("val", evenly_spaced(np.arange(num), num, num_val).tolist())
    found = Familiarity.fit(means, x)
    is_finite = means.isfinite().all() and found.cosines.isfinite().all()
    return found if is_finite and len(x) else None
