"""Checks of a fit's values that need neither data nor weights, so that an error comes before either is fetched."""

from typing import Any

import torch
from pytorch_lightning.cli import instantiate_class

from finetune.commands.short_words import both
from finetune.models.ensemble import check
from finetune.models.stages import check_solved
from finetune.system.messages import WrongUsage
from finetune.training.param_groups import check_rates


def check_values(config: Any) -> None:
    """Check the values of a fit, as far as that is possible without images and a network.

    Args:
        config: The options of `fit`, as parsed.

    Raises:
        WrongUsage: A value is invalid.
    """
    model, trainer = config.model, config.trainer
    for name in ("max_epochs", "max_steps", "limit_train_batches"):
        if trainer[name] == 0:
            raise WrongUsage(f"nothing to train: {both('fit', f'trainer.{name}')} is 0")
    check_rates(model.head_lr_multiplier, model.layer_decay, model.label_smoothing)
    check(model.members, model.head_init)
    check_solved(model.freeze, model.head_init, model.members)
    if model.freeze == "backbone" and config.ckpt_path is not None:
        raise WrongUsage("--ckpt_path goes on with training, and model.freeze backbone has none: give it as --weights")
    _check_optimizer(model.optimizer)
    has_gpu = trainer.accelerator not in ("cpu", "auto") or (
        trainer.accelerator == "auto" and torch.accelerator.is_available()
    )
    if not has_gpu and not _is_number(trainer.devices):
        option = f"{both('fit', 'trainer.devices')} {trainer.devices}"
        raise WrongUsage(f"{option}: there is no GPU to name here; on a CPU give a number of processes, such as 2")


def _check_optimizer(optimizer: Any) -> None:
    values = {"class_path": optimizer.class_path, "init_args": dict(optimizer.init_args)}
    try:
        instantiate_class([torch.zeros(1, 1, requires_grad=True)], values)
    except ValueError as error:
        is_rate = "learning rate" in str(error)
        option = both("fit", "model.optimizer.lr" if is_rate else "model.optimizer")
        raise WrongUsage(f"{option}: {error}") from error


def _is_number(devices: Any) -> bool:
    """Return whether `trainer.devices` is a number of processes or `auto`, not a list of GPUs."""
    text = str(devices)
    return text == "auto" or (text.isdigit() and int(text) > 0)
