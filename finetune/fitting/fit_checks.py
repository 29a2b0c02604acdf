"""Checks of a fit: of its settings before images and weights are read, and before training of what is asked."""

import json
import warnings
from types import MappingProxyType
from typing import Any

import torch
from pytorch_lightning import Trainer

from finetune.data.addresses import is_address
from finetune.data.batch_limits import batches_within
from finetune.data.datamodule import ImageDataModule
from finetune.data.samplers import evaluated_targets
from finetune.distributed.launch import check_num_processes, has_launcher, is_launched
from finetune.fitting.build import data_arguments, optimizer_maker, scheduler_maker
from finetune.fitting.resume import Start
from finetune.settings.fields import settings_of
from finetune.settings.layers import Layers
from finetune.settings.schema import FitSettings, ModelSettings
from finetune.system.messages import WrongUsage, as_wrong_usage, reason
from finetune.training.classifier import Classifier
from finetune.training.lr_schedulers import with_total_steps
from finetune.training.run_limits import fit_limits

_SOME_STEPS = 1000  # the real number of steps is known only after images are listed
# Settings that cannot go with several fits, and why.
_NOT_WITH_SEVERAL = MappingProxyType(
    {
        "ckpt_path": "each of the fits begins anew: pass --weights",
        "trainer.num_nodes": "the fits run on one machine",
        "allow_changes": "all fits must have the same settings",
    }
)
_NOT_WITH_FOLDS = MappingProxyType(
    {
        **_NOT_WITH_SEVERAL,
        "data.fold": "--folds runs all folds",
        "data.num_folds": "--folds runs all folds",
        "data.test_fraction": "with --folds each image is tested once",
        "test_after_fit": "with --folds each image is tested once",
        "trainer.limit_test_batches": "with --folds each image is tested once",
    }
)
_NOT_WITH_MEMBERS = MappingProxyType(
    {**_NOT_WITH_SEVERAL, "model.init_seed": "each member has its own"}
)


def check_values(settings: FitSettings) -> None:
    """Check what is possible without images and a network: settings together, and what torch makes of them.

    Raises:
        WrongUsage: A value is invalid, or does not go with another one.
    """
    model = settings.model
    trainer = settings.trainer
    for name in ("max_epochs", "max_steps", "limit_train_batches"):
        if getattr(trainer, name) == 0:
            raise WrongUsage("is 0: nothing to train", f"trainer.{name}")
    if data_arguments(settings.data).get("predict") is not None:
        raise WrongUsage(
            "has images to classify: it is for finetune predict, not fit", "data.predict"
        )
    if model.freeze == "backbone" and settings.ckpt_path is not None:
        raise WrongUsage(
            "--ckpt_path continues training, and model.freeze backbone has none: pass it as --weights"
        )
    _check_optimizer(model)
    check_num_processes(trainer.devices, trainer.accelerator)
    has_gpu = trainer.accelerator not in ("cpu", "auto") or (
        trainer.accelerator == "auto" and torch.accelerator.is_available()
    )
    devices = str(trainer.devices)
    if not has_gpu and devices != "auto" and not (devices.isdigit() and int(devices) > 0):
        raise WrongUsage(
            f"{devices}: there is no GPU on this machine; on a CPU pass a number of processes, such as 2",
            "trainer.devices",
        )


def _check_optimizer(model: ModelSettings) -> None:
    """Make optimizer and scheduler of a fit for a single parameter, and step them.

    Raises:
        WrongUsage: One of their arguments is wrong.
    """
    make = optimizer_maker(model)
    try:
        optimizer = make([torch.zeros(1, 1, requires_grad=True)])
    except (ValueError, TypeError) as error:
        name = "model.optimizer.lr" if "learning rate" in str(error) else "model.optimizer"
        raise WrongUsage(reason(error), name) from error
    make_scheduler = scheduler_maker(model)
    if make_scheduler is None:
        return
    try:
        scheduler = with_total_steps(make_scheduler, _SOME_STEPS)(optimizer)
        # torch warns of a scheduler that is stepped before its optimizer, and checks few arguments before the step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler.step()
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise WrongUsage(reason(error), "model.scheduler") from error


def default_of(name: str) -> Any:
    """Return the default of a setting, which a config may name."""
    return settings_of(FitSettings)[name].default


def check_several(settings: FitSettings, layers: Layers) -> None:
    """Refuse what a cross-validation or an ensemble cannot have.

    Raises:
        WrongUsage: A setting does not go with several fits, or a launcher has started this process.
    """
    option = "--members" if settings.folds is None else "--folds"
    refused = _NOT_WITH_MEMBERS if settings.folds is None else _NOT_WITH_FOLDS
    for name, why in refused.items():
        if layers.is_explicit(name) and layers.value(name) != default_of(name):
            raise WrongUsage(f"does not go with {option}: {why}", name)
    if any(is_address(layer.values.get("trainer.default_root_dir")) for layer in layers.layers):
        raise WrongUsage(
            f"{option} writes to a local folder: pass one as --out, and copy it to object storage afterwards"
        )
    if has_launcher():
        each = "--data.num_folds and --data.fold" if settings.folds else "--model.init_seed"
        raise WrongUsage(
            f"{option} starts a process for each fit: with torchrun or srun, run each by {each}"
        )


def check_validated(trainer: Trainer, data: ImageDataModule, what: str) -> None:
    """Make sure that the fit will validate.

    Args:
        trainer: The Trainer of the fit.
        data: Its images.
        what: The beginning of the error message: what validation is needed for.

    Raises:
        ValueError: There is no validation, or the fit ends before the first one.
    """
    if "val" in data.splits and trainer.limit_val_batches == 0:
        raise ValueError(f"{what}, and trainer.limit_val_batches is 0: omit it")
    if "val" not in data.splits:
        raise ValueError(
            f"{what}, and there is no validation split: --data.val_fraction 0.1 splits one off train"
        )
    num = fit_limits(trainer).num_reads(data.num_batches, 1)  # of batches
    first = _first_validation(trainer, data.num_batches)
    if num < first:
        raise ValueError(
            f"{what}, and the fit ends after {num} batches, before the first validation after {first}: set more "
            "epochs or steps, or a smaller trainer.val_check_interval"
        )


def _first_validation(trainer: Trainer, num_batches: int) -> int:
    """Return after how many batches a fit first validates."""
    batches = batches_within(trainer.limit_train_batches, num_batches)
    return (
        _validation_interval(trainer, batches)
        + ((trainer.check_val_every_n_epoch or 1) - 1) * batches
    )


def _validation_interval(trainer: Trainer, num_batches: int) -> int:
    """Return the number of batches between validations in an epoch of `num_batches` batches."""
    interval = trainer.val_check_interval
    return interval if isinstance(interval, int) else max(1, int(num_batches * interval))


def check_validates_after_steps(trainer: Trainer, data: ImageDataModule) -> None:
    """Make sure that no validation within an epoch comes between batches whose gradients are accumulated.

    Raises:
        ValueError: One does.
    """
    num = trainer.accumulate_grad_batches
    batches = batches_within(trainer.limit_train_batches, data.num_batches)
    each = _validation_interval(trainer, batches)
    if "val" in data.splits and each < batches and each % num != 0:
        raise ValueError(
            f"trainer.val_check_interval {trainer.val_check_interval} validates every {each} batches, inside a step of "
            f"trainer.accumulate_grad_batches {num}: set a multiple of it"
        )


def check_has_positives(trainer: Trainer, data: ImageDataModule) -> None:
    """Make sure that the validation images have both classes, which choosing a threshold needs.

    If images have several labels, one with a label and one without are enough: see `training.calibration_fit`.
    """
    check_validated(trainer, data, "--threshold is chosen on validation images")
    targets = data.splits["val"].targets
    measured = evaluated_targets(targets, trainer.limit_val_batches, data.batch_size)
    num = len(measured)
    counts = measured.counts()
    if data.label_kind == "single" and not counts.all():
        name = data.class_names[int(counts.argmin())]
        left = f" in the {num} that trainer.limit_val_batches leaves" if num < len(targets) else ""
        raise ValueError(
            f"--threshold needs validation images of both classes, there is none of {name}{left}"
        )


def check_begun_from(start: Start, model: Classifier) -> None:
    """Make sure that a new run has the class weights and the optimizer of the checkpoint that it starts from."""
    path = start.path
    checkpoint = start.content
    hint = f"use the same, or begin with its weights alone: --weights {path}"
    class_weights = checkpoint["hyper_parameters"].get("class_weights")
    if class_weights != model.class_weights:
        difference = f"model.class_weights {json.dumps(class_weights)}, not {json.dumps(model.class_weights)}"
        raise ValueError(f"{path} was trained, and continues, with {difference}: {hint}")
    with as_wrong_usage("model.optimizer"):
        optimizer = model.optimizer([{"params": [torch.zeros(1, 1, requires_grad=True)]}])
    # Optimizers differ in their numeric settings. Boolean settings differ between versions of torch.
    settings = {
        name for name, value in optimizer.defaults.items() if type(value) in (int, float, tuple)
    }
    groups = [
        group for state in checkpoint.get("optimizer_states", ()) for group in state["param_groups"]
    ]
    if groups and (lacking := sorted(settings - groups[0].keys())):
        difference = f"another optimizer than {type(optimizer).__name__}, one without {lacking[0]}"
        raise ValueError(f"{path} was trained, and continues, with {difference}: {hint}")


def check_minutes(settings: FitSettings, layers: Layers) -> None:
    """Make sure that a fit can have `--minutes`.

    Raises:
        WrongUsage: Another limit is set, too. The fit starts from a checkpoint. It uses several machines. Or validation
            is not a share of an epoch.
    """
    limits = ("max_steps", "max_epochs", "limit_train_batches")
    for name in (f"trainer.{limit}" for limit in limits):
        layer = layers.layer_of(name)
        # epochs of a config are overruled, its steps are not; the run that continues has its own limit
        if layer is None or layer.values[name] == default_of(name):
            continue
        if layer.is_typed or (layer.kind == "config" and name == "trainer.max_steps"):
            raise WrongUsage("and --minutes both set the length of training: remove one", name)
    if settings.trainer.num_nodes != 1 or is_launched():
        raise WrongUsage(
            "--minutes measures on one machine: on several, pass --epochs (--trainer.max_epochs) instead"
        )
    if settings.ckpt_path is not None:
        raise WrongUsage(
            "--minutes chooses the length of a fit from its first step: to continue from --ckpt_path pass --epochs, to "
            "start from its weights pass it as --weights"
        )
    interval = settings.trainer.val_check_interval
    if interval is not None and not (isinstance(interval, float) and 0 < interval <= 1):
        raise WrongUsage(
            f"{interval} is a number of batches, and --minutes chooses how many an epoch has: set it as a share of "
            "the epoch, such as 0.5",
            "trainer.val_check_interval",
        )
