"""A network's first forward pass, on one blank picture before all else: what can't work is told before work is done."""

import math
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from finetune.data.data_settings import is_without
from finetune.data.datasets.image_folder import ImageFolderData
from finetune.data.samplers import batches_within, check_limit
from finetune.models.backbones import OWN
from finetune.models.stages import batch_norms
from finetune.models.timm_backbones import describe, is_timm
from finetune.system.messages import WrongUsage
from finetune.training.classifier import Classifier
from finetune.training.run_limits import most_accumulated, size_schedule


def check_first_pass(model: Classifier, image_size: int) -> dict[nn.Module, int]:
    """Let the network, as it is in evaluation, see a picture; nothing of it changes.

    Args:
        model: On the CPU.
        image_size: Side of the picture in pixels.

    Returns:
        For each batch norm that trains how many values of a channel one picture gives it.

    Raises:
        ValueError: The network can't take pictures of this size.
    """
    network, num_values = model.network, dict[nn.Module, int]()

    def count(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        num_values[norm] = inputs[0].numel() // inputs[0].size(1)

    resting = {id(inner) for part in model.always_eval for inner in part.modules()}
    trained = [norm for norm in batch_norms(network) if id(norm) not in resting]
    handles = [norm.register_forward_pre_hook(count) for norm in trained]
    modes = [(module, module.training) for module in network.modules()]
    try:
        with torch.no_grad():
            network.eval()(torch.zeros(1, 3, image_size, image_size, dtype=model.mean.dtype))
    except Exception as error:  # a network may say in any way that a picture is too small
        reason = " ".join(str(error).split()) or type(error).__name__
        hint = "" if model.backbone in OWN else "; most networks take --data.image_size 224"
        if is_timm(model.backbone):
            hint = (
                f"; that of its weights is --data.image_size {describe(model.backbone).image_size}"
            )
        size = f"{image_size}x{image_size} pixels"
        raise ValueError(
            f"{model.backbone} can't take pictures of {size}: {reason}{hint}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes:
            module.training = mode
    return num_values


def _check_solved(data: Any) -> None:
    """Make sure that nothing asks for images that a head which is solved exactly does not see."""
    for name in ("mixup", "cutmix", "image_size_schedule"):
        if data.hparams.get(name):
            told = "the head is solved on images as evaluation has them"
            raise WrongUsage(
                f"data.{name} has no effect with model.freeze backbone, since {told}: leave it out"
            )


def check_fit(
    trainer: pl.Trainer, model: Classifier, data: Any, command: str = "fit", is_tested: bool = True
) -> None:
    """Make sure that there is something to do, and that the network can take the pictures and train on every batch.

    Batch norm needs two values of a channel in a batch, over all devices together; where its maps are of one pixel, two
    pictures. The last batch of an epoch may have one.

    Raises:
        WrongUsage: Nothing is to be done, or a setting has no effect.
        ValueError: There are no pictures to train on, or none of a class, or they or a batch can't be taken.
    """
    limits = {
        name: getattr(trainer, name) for name in ("max_epochs", "max_steps", "limit_train_batches")
    }
    if command == "fit" and (
        nothing := [f"trainer.{name} is 0" for name, limit in limits.items() if limit == 0]
    ):
        raise WrongUsage(f"nothing to train: {nothing[0]}")
    if command == "fit" and isinstance(data, ImageFolderData):
        data.check_taught()  # it fails here, before other processes are started
    if command == "fit" and "train" not in data.splits:
        raise ValueError(is_without(data.root, "train"))
    unused = [
        name for name in ("source_classes", "class_mapping") if getattr(model, name) is not None
    ]
    if command == "fit" and unused and model.head_init != "source":
        raise WrongUsage(
            f"model.{unused[0]} is for --model.head_init source, not {model.head_init}"
        )
    if command == "fit" and model.is_solved:
        _check_solved(data)
    split = {"validate": "val", "test": "test", "predict": "predict"}.get(command)
    if split and getattr(trainer, f"limit_{split}_batches") == 0:
        raise WrongUsage(f"nothing to {command}: trainer.limit_{split}_batches is 0")
    for name in ("train", "val", *(["test"] if is_tested else ())) if command == "fit" else ():
        if name in data.splits:  # said before training, not behind it
            limit = getattr(trainer, f"limit_{name}_batches")
            check_limit(limit, name, len(data.splits[name].labels), data.batch_size)
    num_values = check_first_pass(model, data.eval_image_size)
    if command != "fit":
        return
    schedule = size_schedule(trainer, data.sizes)
    sizes = sorted({data.image_size} if schedule is None else schedule.sizes)
    num_values, *_ = [
        num_values if size == data.eval_image_size else check_first_pass(model, size)
        for size in sizes
    ]
    if 1 not in num_values.values():
        return
    num = len(data.splits["train"].labels)
    num_batches = math.ceil(num / data.batch_size)
    is_reached = num_batches == batches_within(trainer.limit_train_batches, num_batches)
    is_reached &= trainer.max_steps == -1 or num_batches <= trainer.max_steps * most_accumulated(
        trainer
    )
    if (num - 1) % data.batch_size == 0 and (is_reached or data.batch_size == 1):
        raise ValueError(
            f"{num} pictures to train on, in batches of {data.batch_size}, leave one for the last batch, and the batch "
            f"norm of {model.backbone} can't train on one at {sizes[0]} pixels: take another --data.batch_size, "
            "a larger --data.image_size, or --model.freeze_batch_norm true"
        )
