"""Build the parts of a command from its settings: images, network, and a Trainer with callbacks and loggers."""

import importlib
import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from msgspec.structs import asdict
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Callback, Checkpoint
from pytorch_lightning.utilities import rank_zero_only

from finetune import lightning_private
from finetune.data.addresses import check_scheme, is_address
from finetune.data.datamodule import ImageDataModule
from finetune.distributed.launch import cluster_environment, num_processes
from finetune.distributed.ranks import take_over
from finetune.distributed.signals import StopAtOnce, is_rank_zero
from finetune.distributed.waits import LimitWaits
from finetune.reports.live_report import LiveReport
from finetune.runs.checkpoint_io import AtomicCheckpointIO
from finetune.runs.clock import Clock
from finetune.runs.folder import Run, RunFolder
from finetune.runs.learning_rates import Rates
from finetune.runs.local_copies import address_of, local_copy
from finetune.runs.loggers import LoggedConfig, RunLogger
from finetune.runs.metrics_csv import MetricsCSV
from finetune.runs.model_checkpoint import Checkpoints
from finetune.runs.predictions import AnswersWriter
from finetune.runs.results import Results, Skipped
from finetune.runs.sync import names_there
from finetune.settings.fields import ClassSettings
from finetune.settings.schema import (
    Data,
    DataSettings,
    FitSettings,
    ModelSettings,
    TrainerSettings,
)
from finetune.system.machine import keep_freed_memory
from finetune.system.messages import WrongUsage, as_wrong_usage, did_you_mean
from finetune.training.classifier import Classifier
from finetune.training.precision import prepare_arithmetic
from finetune.training.progress_bar import ImageProgressBar

# Arguments of Lightning's Trainer that are no options.
_FIXED: Mapping[str, Any] = {
    "use_distributed_sampler": False,  # our sampler splits every batch exactly
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def import_class(class_path: str, setting: str) -> Any:
    """Return the class of an import path.

    Args:
        class_path: The path.
        setting: The setting that has it, for the error.

    Raises:
        WrongUsage: There is no such class.
    """
    place, _, name = class_path.rpartition(".")
    try:
        return getattr(importlib.import_module(place), name)
    except (ImportError, ValueError) as error:
        raise WrongUsage(f"cannot import {class_path!r}: {error}", setting) from error
    except AttributeError as error:
        names = [one for one in dir(importlib.import_module(place)) if not one.startswith("_")]
        hint = did_you_mean(name, names)
        raise WrongUsage(f"{place} has no {name!r}{hint}", setting) from error


def check_arguments(kind: Any, arguments: Mapping[str, Any], setting: str) -> None:
    """Check that a class takes these arguments.

    Raises:
        WrongUsage: It does not take one.
    """
    parameters = inspect.signature(kind).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    for name in arguments:
        if name not in parameters and not takes_any:
            hint = did_you_mean(name, list(parameters))
            raise WrongUsage(f"{kind.__name__} has no argument {name!r}{hint}", f"{setting}.{name}")


def data_arguments(settings: Data) -> dict[str, Any]:
    """Return the arguments of the data module: all of one of ours, and of a user's those that were set."""
    if isinstance(settings, ClassSettings):
        return dict(settings.init_args)
    arguments = asdict(settings)
    del arguments["class_path"]
    return arguments


def arguments_in_effect(settings: Data) -> dict[str, Any]:
    """Return the arguments of the data module with its defaults, which a class of the user may have of its own."""
    if not isinstance(settings, ClassSettings):
        return data_arguments(settings)
    parameters = inspect.signature(import_class(settings.class_path, "data.class_path")).parameters
    defaults = {
        name: one.default for name, one in parameters.items() if one.default is not one.empty
    }
    return {**data_arguments(DataSettings()), **defaults, **settings.init_args}


def takes(settings: Data, name: str) -> bool:
    """Return whether the data module has an argument; a class of the user need not have those of ours."""
    if not isinstance(settings, ClassSettings):
        return True
    parameters = inspect.signature(import_class(settings.class_path, "data.class_path")).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return takes_any or name in parameters


def open_data(settings: Data) -> ImageDataModule:
    """Return the data module of some settings. It reads no files yet.

    Raises:
        WrongUsage: There is no such class, or it does not take these arguments.
    """
    kind = import_class(settings.class_path, "data.class_path")
    if not (isinstance(kind, type) and issubclass(kind, ImageDataModule)):
        raise WrongUsage(
            f"{settings.class_path} is not a data module of finetune, such as ImageFolderData",
            "data.class_path",
        )
    arguments = data_arguments(settings)
    check_arguments(kind, arguments, "data")
    with as_wrong_usage("data"):
        return kind(**arguments)


def maker(settings: ClassSettings, base: type, setting: str) -> Callable[..., Any]:
    """Return what makes an optimizer or a scheduler of some settings.

    Raises:
        WrongUsage: There is no such subclass of `base`, or it does not take these arguments.
    """
    kind = import_class(settings.class_path, setting)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise WrongUsage(f"{settings.class_path} is not a subclass of {base.__name__}", setting)
    check_arguments(kind, settings.init_args, setting)
    return partial(kind, **settings.init_args)


def optimizer_maker(model: ModelSettings) -> Callable[..., torch.optim.Optimizer]:
    return maker(model.optimizer, torch.optim.Optimizer, "model.optimizer")


def scheduler_maker(
    model: ModelSettings,
) -> Callable[..., torch.optim.lr_scheduler.LRScheduler] | None:
    if model.scheduler is None:
        return None
    return maker(model.scheduler, torch.optim.lr_scheduler.LRScheduler, "model.scheduler")


def build_model(settings: ModelSettings, data: ImageDataModule) -> Classifier:
    """Return a network for the classes of some images, with random weights until the fit begins."""
    arguments = asdict(settings) | {
        "optimizer": optimizer_maker(settings),
        "scheduler": scheduler_maker(settings),
    }
    return Classifier(
        class_names=data.class_names,
        network_size=data.image_size,
        label_kind=data.label_kind,
        **arguments,
    )


def fit_callbacks(settings: FitSettings, run: Run) -> list[Callback]:
    """Return the callbacks of a fit.

    Args:
        settings: Its settings.
        run: Its run.
    """
    callbacks: list[Callback] = [
        Rates(),
        Checkpoints(run, settings.checkpoint_every_n_steps, settings.patience),
        Clock(run),
    ]
    if settings.report:
        callbacks.append(LiveReport(run))
    return [*callbacks, AnswersWriter(run)]


def build_trainer(
    settings: TrainerSettings, run: Run, config: str, callbacks: Sequence[Callback]
) -> Trainer:
    """Return a Trainer whose callbacks and loggers write into the folder of a run.

    Args:
        settings: Its arguments, with the precision.
        run: The run.
        config: The content of config.yaml.
        callbacks: Those of the command.

    Raises:
        WrongUsage: A setting is not supported on this machine.
    """
    folder = RunFolder(run, config)
    loggers = [MetricsCSV(run), *(RunLogger(name, run) for name in settings.logger or ())]
    all_callbacks = [
        *(folder, LoggedConfig(folder), StopAtOnce(), LimitWaits()),
        *callbacks,
        # after the predictions of a test, from which an interval is computed
        *(Results(run), Skipped(run)),
    ]
    if settings.enable_progress_bar is not False:
        all_callbacks.append(ImageProgressBar())
    devices, num_nodes = num_processes(settings.devices, settings.num_nodes)
    arguments = asdict(settings) | {
        "devices": devices,
        "num_nodes": num_nodes,
        "logger": loggers,
        "callbacks": all_callbacks,
        "plugins": [AtomicCheckpointIO(), *cluster_environment()],
        "enable_checkpointing": any(isinstance(one, Checkpoint) for one in callbacks),
    }
    with as_wrong_usage("trainer"):
        trainer = Trainer(**arguments, **_FIXED)
    if num_nodes > 1 and address_of(run.root) is not None and "FINETUNE_CACHE" not in os.environ:
        raise WrongUsage(
            "a run in object storage on several machines needs FINETUNE_CACHE, a folder that all of them share"
        )
    return _made_ready(trainer)


def _made_ready(trainer: Trainer) -> Trainer:
    """Complete a new Trainer: the end of its processes, arithmetic, memory allocator, and counting of epochs."""
    take_over(trainer)
    # Lightning reads the rank from the environment, which may still have that of another job.
    if trainer.world_size == 1:
        rank_zero_only.rank = 0  # type: ignore[attr-defined]
    prepare_arithmetic(trainer)
    # A profile without a file goes to Lightning's log, most of which we hide.
    logging.getLogger("pytorch_lightning.profilers.profiler").setLevel(logging.INFO)
    if trainer.strategy.root_device.type == "cpu":
        keep_freed_memory()
    lightning_private.count_ended_epochs(trainer)
    if not lightning_private.has_auto_requeue(trainer):
        lightning_private.disable_sigterm_broadcast(trainer)
    return trainer


def local_root(root: str, command: str) -> str:
    """Return the folder to which a command writes runs: for an address its local copy.

    Raises:
        StorageError: The storage cannot be reached.
    """
    if not is_address(root):
        check_scheme(root)
        return root
    folder = local_copy(root)
    if is_rank_zero():
        names_there(folder, command)
    return str(folder)


def has_several_processes(trainer: Trainer) -> bool:
    """Return whether Lightning starts the processes of other devices, as the command of this one."""
    launcher: Any = trainer.strategy.launcher
    is_starter = lightning_private.is_subprocess_launcher(launcher)
    return is_starter and not launcher.cluster_environment.creates_processes_externally
