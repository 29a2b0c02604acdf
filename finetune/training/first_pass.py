"""Checks before training: what cannot work fails before any work is done."""

import math
from typing import Any

import pytorch_lightning as pl
from torch import nn

from finetune.data.batch_limits import batches_within, check_limit, num_within
from finetune.data.data_settings import missing_split_message
from finetune.data.datasets.image_folder import ImageFolderData
from finetune.models.image_classifier import check_first_pass
from finetune.system.messages import WrongUsage
from finetune.training.classifier import Classifier
from finetune.training.outputs import check_memory

_OTHER_LABELS = {
    "single": "the network predicts one class per image, and the images of {root} have several labels",
    "several": "the network predicts several labels an image, and the images of {root} have one class each",
}


def _check_label_kind(model: Classifier, data: Any, command: str) -> None:
    """Check that the labels are those that the network predicts."""
    if command != "predict" and data.label_kind != model.task.label_kind:
        raise ValueError(_OTHER_LABELS[model.task.label_kind].format(root=data.root))


def check_fit(
    trainer: pl.Trainer, model: Classifier, data: Any, command: str = "fit", is_tested: bool = True
) -> None:
    """Check that a command has something to do, and that the network can take the images and train on every batch.

    Batch norm needs at least two values per channel in the global batch. If its feature maps have one pixel, that means
    two images. The last batch of an epoch may have only one image.

    Args:
        trainer: Its limits are checked.
        model: The classifier.
        data: The data module, after `setup`.
        command: `fit`, `validate`, `test` or `predict`.
        is_tested: Whether a test follows the fit.

    Raises:
        WrongUsage: There is nothing to do.
        ValueError: Training images are missing, or the network does not take the images or the last batch.
    """
    if command == "fit":
        _check_training_images(data)
    _check_label_kind(model, data, command)
    if command == "fit":
        _check_limits(trainer, data, is_tested)
    else:
        split = {"validate": "val", "test": "test", "predict": "predict"}[command]
        if getattr(trainer, f"limit_{split}_batches") == 0:
            raise WrongUsage(f"nothing to {command}: trainer.limit_{split}_batches is 0")
    _check_memory(trainer, model, data, command, is_tested)
    num_values = _trained_values(model, data.image_size)
    if command == "fit" and 1 in num_values.values():
        _check_last_batch(trainer, model, data, data.image_size)


def _check_training_images(data: Any) -> None:
    """Check that there are training images of each class."""
    if isinstance(data, ImageFolderData):
        data.check_can_train()  # before Lightning starts other processes
    if "train" not in data.splits:
        raise ValueError(missing_split_message(data.root, "train"))


def _check_limits(trainer: pl.Trainer, data: Any, is_tested: bool) -> None:
    """Check the limits of the batches of all splits: a wrong one of test is an error before training, not after it."""
    for name in ("train", "val", "test"):
        if name in data.splits and (name != "test" or is_tested):
            limit = getattr(trainer, f"limit_{name}_batches")
            check_limit(limit, name, len(data.splits[name]), data.batch_size)


def _check_memory(
    trainer: pl.Trainer, model: Classifier, data: Any, command: str, is_tested: bool
) -> None:
    """Check that the outputs of the splits that are measured fit into memory."""
    splits = {"fit": ("val", "test") if is_tested else ("val",), "validate": ("val",)}
    for split in splits.get(command, (command,)):
        if split not in data.splits or command == "predict":
            continue
        limit = getattr(trainer, f"limit_{split}_batches")
        num = num_within(limit, len(data.splits[split]), data.batch_size)
        has_pairs = command != "fit" or split == "test"
        check_memory(split, num, len(model.class_names), model.task.label_kind, has_pairs)


def _check_last_batch(trainer: pl.Trainer, model: Classifier, data: Any, image_size: int) -> None:
    """Check that no batch has a single image, for a network whose batch norm gets one value per channel from it.

    Args:
        trainer: Its limits may end the fit before the last batch of an epoch.
        model: The classifier.
        data: The data module.
        image_size: Side of the images in pixels, for the error message.
    """
    num = len(data.splits["train"])
    num_batches = math.ceil(num / data.batch_size)
    is_reached = num_batches == batches_within(trainer.limit_train_batches, num_batches)
    max_batches = trainer.max_steps * trainer.accumulate_grad_batches
    is_reached &= trainer.max_steps == -1 or num_batches <= max_batches
    if (num - 1) % data.batch_size == 0 and (is_reached or data.batch_size == 1):
        raise ValueError(
            f"{num} images to train on, in batches of {data.batch_size}, leave one for the last batch, and the batch "
            f"norm of {model.backbone} cannot train on one at {image_size} pixels: take another --data.batch_size, "
            "a larger --data.image_size, or --model.freeze_batch_norm true"
        )


def _trained_values(model: Classifier, image_size: int) -> dict[nn.Module, int]:
    """Return for each batch norm in training mode the number of values per channel that it gets from one image."""
    num_values = check_first_pass(model.image_classifier, model.backbone, image_size)
    fixed = {inner for part in model.always_eval for inner in part.modules()}
    return {norm: num for norm, num in num_values.items() if norm not in fixed}
