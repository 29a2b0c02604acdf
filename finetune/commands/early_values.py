"""Check the values of a fit that need neither data nor weights, before either is downloaded or read."""

import warnings
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning import Trainer
from pytorch_lightning.cli import LRSchedulerCallable, instantiate_class
from torch.optim import Optimizer

from finetune.commands.options import flag_names
from finetune.commands.trainer import check_allowed, patience
from finetune.models.ensemble import check_members
from finetune.models.multi_stage import check_num_stages
from finetune.models.stages import check_solved
from finetune.runs.model_checkpoint import check_interval
from finetune.system.messages import WrongUsage, reason
from finetune.training.loss import check_smoothing
from finetune.training.lr_schedulers import with_total_steps
from finetune.training.param_groups import check_rates
from finetune.training.threshold import check_form

_SOME_STEPS = 1000  # the real number of steps is known only after images are listed
_LIMITS = (
    "max_epochs",
    "max_steps",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "log_every_n_steps",
    "accumulate_grad_batches",
    "gradient_clip_val",
)


def check_values(config: Any) -> None:
    """Check the values of a fit, as far as that is possible without images and a network.

    Args:
        config: The options of `fit`, as parsed.

    Raises:
        WrongUsage: A value is invalid.
    """
    model = config.model
    trainer = config.trainer
    for name in ("max_epochs", "max_steps", "limit_train_batches"):
        if trainer[name] == 0:
            raise WrongUsage(f"nothing to train: {flag_names('fit', f'trainer.{name}')} is 0")
    if config.patience is not None:
        patience(config.patience)
    if config.threshold is not None:
        check_form(config.threshold)
    check_interval(config.checkpoint_every_n_steps)
    check_allowed(trainer)
    _check_trainer(trainer)
    check_rates(model.head_lr_multiplier, model.layer_decay)
    check_smoothing(model.label_smoothing)
    check_members(model.members, model.head_init)
    check_solved(model.freeze, model.head_init, model.members)
    check_num_stages(model.head_stages)
    if model.freeze == "backbone" and config.ckpt_path is not None:
        raise WrongUsage(
            "--ckpt_path continues training, and model.freeze backbone has none: pass it as --weights"
        )
    optimizer = _make_optimizer(model.optimizer)
    _check_scheduler(model.scheduler, optimizer)
    has_gpu = trainer.accelerator not in ("cpu", "auto") or (
        trainer.accelerator == "auto" and torch.accelerator.is_available()
    )
    if not has_gpu and not _is_number_of_processes(trainer.devices):
        option = f"{flag_names('fit', 'trainer.devices')} {trainer.devices}"
        raise WrongUsage(
            f"{option}: there is no GPU on this machine; on a CPU pass a number of processes, such as 2"
        )


def _make_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer of a fit for a single parameter."""
    values = {"class_path": optimizer.class_path, "init_args": dict(optimizer.init_args)}
    try:
        made: Optimizer = instantiate_class([torch.zeros(1, 1, requires_grad=True)], values)
    except ValueError as error:
        is_rate = "learning rate" in str(error)
        option = flag_names("fit", "model.optimizer.lr" if is_rate else "model.optimizer")
        raise WrongUsage(f"{option}: {error}") from error
    return made


def _check_scheduler(scheduler: Any, optimizer: Optimizer) -> None:
    if scheduler is None:
        return
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--scheduler", type=LRSchedulerCallable)
    settings = scheduler.as_dict() if isinstance(scheduler, Namespace) else scheduler
    make = parser.instantiate(parser.parse_object({"scheduler": settings})).scheduler
    try:
        made = with_total_steps(make, _SOME_STEPS)(optimizer)
        with (
            warnings.catch_warnings()
        ):  # torch warns of a scheduler that is stepped before its optimizer
            warnings.simplefilter("ignore")
            made.step()  # torch checks few arguments when it creates a scheduler
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise WrongUsage(f"{flag_names('fit', 'model.scheduler')}: {reason(error)}") from error


def _check_trainer(trainer: Any) -> None:
    """Let Lightning check limits now, which it would otherwise do after images are listed and weights are read."""
    limits = {name: trainer[name] for name in _LIMITS}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Trainer(
                accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **limits
            )
    except (MisconfigurationException, ValueError, TypeError) as error:
        # without backticks, `with_options` finds the arguments, and writes them as flags
        raise WrongUsage(reason(error).replace("`", "")) from error


def _is_number_of_processes(devices: Any) -> bool:
    """Return whether `trainer.devices` is a number of processes or `auto`, not a list of GPUs."""
    text = str(devices)
    return text == "auto" or (text.isdigit() and int(text) > 0)
