"""Build the parts of a command from its settings: network, and a Trainer with callbacks and loggers; and close them."""

import inspect
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from msgspec.structs import asdict
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Callback, Checkpoint, LearningRateMonitor
from pytorch_lightning.utilities import rank_zero_only

from finetune import lightning_private
from finetune.data.addresses import check_scheme, is_address
from finetune.data.datamodule import ImageDataModule, data_arguments
from finetune.distributed.launch import cluster_environment, num_processes
from finetune.distributed.ranks import ending, take_over
from finetune.distributed.signals import install_stop_at_once, is_rank_zero, stop_signals
from finetune.distributed.waits import LimitWaits
from finetune.reports.live_report import LiveReport
from finetune.runs.checkpoint_io import AtomicCheckpointIO
from finetune.runs.clock import Clock
from finetune.runs.folder import Run, RunFolder
from finetune.runs.local_copies import address_of, local_copy
from finetune.runs.loggers import LoggedConfig, RunLogger, run_loggers
from finetune.runs.metrics_csv import MetricsCSV
from finetune.runs.model_checkpoint import Checkpoints
from finetune.runs.results import Results, Skipped
from finetune.runs.sync import names_there
from finetune.settings.fields import ClassSettings, import_class, takes_argument
from finetune.settings.layers import replaced
from finetune.settings.schema import (
    Data,
    DataSettings,
    FitSettings,
    ModelSettings,
    TrainerSettings,
)
from finetune.system.machine import keep_freed_memory
from finetune.system.messages import WrongUsage, as_wrong_usage, be_quiet
from finetune.training.classifier import Classifier
from finetune.training.lr_schedulers import UNSUPPORTED
from finetune.training.precision import automatic_precision, prepare_arithmetic
from finetune.training.prediction_files import WriteTestPredictions
from finetune.training.progress_bar import ImageProgressBar

log = logging.getLogger(__name__)

# Arguments of Lightning's Trainer that are no options.
_FIXED: Mapping[str, Any] = {
    "use_distributed_sampler": False,  # our sampler splits every batch exactly
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def arguments_in_effect(settings: Data) -> dict[str, Any]:
    """Return the arguments of the data module with its defaults, which a class of the user may have of its own."""
    if not isinstance(settings, ClassSettings):
        return data_arguments(settings)
    kind = import_class(settings.class_path, "data.class_path")
    parameters = inspect.signature(kind).parameters
    defaults = {
        name: one.default for name, one in parameters.items() if one.default is not one.empty
    }
    return {**data_arguments(DataSettings()), **defaults, **settings.init_args}


def takes(settings: Data, name: str) -> bool:
    """Return whether the data module has an argument; a class of the user need not have those of ours."""
    if not isinstance(settings, ClassSettings):
        return True
    return takes_argument(import_class(settings.class_path, "data.class_path"), name)


def optimizer_maker(model: ModelSettings) -> Callable[..., torch.optim.Optimizer]:
    """Return what makes the optimizer of a network, of its parameters.

    Raises:
        WrongUsage: There is no such optimizer, or it does not take these arguments.
    """
    kind = model.optimizer.imported("model.optimizer", torch.optim.Optimizer)
    return partial(kind, **model.optimizer.init_args)


def scheduler_maker(
    model: ModelSettings,
) -> Callable[..., torch.optim.lr_scheduler.LRScheduler] | None:
    """Return what makes the scheduler of an optimizer; None for none. It raises as `optimizer_maker` does."""
    if model.scheduler is None:
        return None
    kind = model.scheduler.imported("model.scheduler", torch.optim.lr_scheduler.LRScheduler)
    if kind.__name__ in UNSUPPORTED:
        raise WrongUsage(
            f"{kind.__name__} is not supported: take finetune.WarmupCosine or another scheduler of torch that scales "
            "the rate of each parameter group by the step",
            "model.scheduler",
        )
    return partial(kind, **model.scheduler.init_args)


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
        LearningRateMonitor("epoch"),
        Checkpoints(run, settings.checkpoint_every_n_steps, settings.patience),
        Clock(run),
    ]
    if settings.report:
        callbacks.append(LiveReport(run))
    return callbacks


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
        *(folder, LoggedConfig(folder), LimitWaits()),
        *callbacks,
        *(WriteTestPredictions(run), Results(run), Skipped(run)),
    ]
    if settings.enable_progress_bar:
        all_callbacks.append(ImageProgressBar())
    devices, num_nodes = num_processes(settings.devices, settings.num_nodes)
    arguments = asdict(settings) | {
        "devices": devices,
        "num_nodes": num_nodes,
        "logger": loggers,
        "callbacks": all_callbacks,
        "plugins": [AtomicCheckpointIO(), *cluster_environment()],
        "enable_progress_bar": False,  # ours is a callback
        "enable_checkpointing": any(isinstance(one, Checkpoint) for one in callbacks),
    }
    with as_wrong_usage("trainer"):
        trainer = Trainer(**arguments, **_FIXED)
    if num_nodes > 1 and address_of(run.root) is not None and "FINETUNE_CACHE" not in os.environ:
        raise WrongUsage(
            "a run in object storage on several machines needs FINETUNE_CACHE, a folder that all of them share"
        )
    return _made_ready(trainer)


def one_device(trainer: TrainerSettings, checkpoint: dict[str, Any]) -> TrainerSettings:
    """Return the settings of a Trainer for the first of its devices, without loggers, to evaluate a checkpoint."""
    devices = str(trainer.devices).strip("[]").split(",")
    precision = trainer.precision or automatic_precision(trainer.accelerator, checkpoint, False)
    values = {
        "devices": 1 if len(devices) == 1 else [int(devices[0])],
        "strategy": "auto",
        "logger": None,
        "precision": precision,
    }
    return replaced(trainer, values)


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


@contextmanager
def stopped_at_once() -> Iterator[None]:
    """Let a command log as a command does, and stop it at the first signal until training begins.

    Then `Checkpoints` handles signals. The handlers of before are back at the end.
    """
    be_quiet()
    handlers = {signum: signal.getsignal(signum) for signum in stop_signals()}
    install_stop_at_once()
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


@contextmanager
def closing(trainer: Trainer, run: Run) -> Iterator[None]:
    """Close loggers and complete the upload of a run at the end of its command, also after an error.

    A run that fails and has no result leaves no folder.
    """

    def close() -> None:
        ending.set()
        for logger in run_loggers(trainer.loggers):
            logger.close()

    try:
        yield
    except BaseException as error:
        close()
        if trainer.is_global_zero and isinstance(error, Exception):
            run.discard_if_empty()
        try:
            run.sync.finish()
        except ValueError as failure:  # the error that ends the command is the one to report
            log.warning("%s", failure)
        raise
    close()
    run.sync.finish()
