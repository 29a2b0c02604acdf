"""Make the arguments of a command's Trainer: precision, processes, callbacks and loggers."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from jsonargparse import Namespace
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Callback, Checkpoint, EarlyStopping, ProgressBar
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from pytorch_lightning.utilities import rank_zero_only

from finetune import lightning_private
from finetune.distributed.launch import check_num_processes, cluster_environment, num_processes
from finetune.distributed.ranks import take_over
from finetune.distributed.signals import StopAtOnce
from finetune.distributed.waits import LimitWaits
from finetune.inference.tta import AverageFlip
from finetune.runs.best_epoch import MONITOR
from finetune.runs.checkpoint_io import AtomicCheckpointIO
from finetune.runs.clock import Clock
from finetune.runs.folder import Run, RunFolder
from finetune.runs.lightning_callbacks import Rates
from finetune.runs.live_report import LiveReport
from finetune.runs.metrics_csv import MetricsCSV
from finetune.runs.model_checkpoint import Checkpoints
from finetune.runs.predictions import AnswersWriter, PredictionWriter
from finetune.runs.results import Results, Skipped
from finetune.runs.run_logger import LoggedConfig, attach
from finetune.runs.worse_than_start import WorseThanStart
from finetune.system.machine import keep_freed_memory
from finetune.system.messages import WrongUsage
from finetune.training.precision import check_precision, prepare_arithmetic
from finetune.training.progress_bar import ImageProgressBar

_STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true")

# The arguments of Lightning's Trainer that are options. Others need a script with a LightningCLI of its own.
OPTIONS = frozenset(
    {
        "accelerator",
        "strategy",
        "devices",
        "num_nodes",
        "precision",
        "logger",
        "callbacks",
        "max_epochs",
        "max_steps",
        "limit_train_batches",
        "limit_val_batches",
        "limit_test_batches",
        "val_check_interval",
        "check_val_every_n_epoch",
        "log_every_n_steps",
        "enable_progress_bar",
        "accumulate_grad_batches",
        "gradient_clip_val",
        "deterministic",
        "profiler",
        "default_root_dir",
    }
)
# Our defaults for some of them, and the values of other arguments.
DEFAULTS = {"default_root_dir": "runs", "log_every_n_steps": 10}
_FIXED = {
    "use_distributed_sampler": False,  # our sampler splits every batch exactly
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}

# Callbacks of Lightning with which a run could not be resumed exactly, or would test other weights.
_UNSUPPORTED_CALLBACKS = (
    "EMAWeightAveraging",
    "GradientAccumulationScheduler",
    "StochasticWeightAveraging",
    "Timer",
    "WeightAveraging",
)


def complete(
    config: Any,
    options: Namespace,
    folder: RunFolder,
    automatic: Callable[[], str],
    monitor: str,
) -> dict[str, Any]:
    """Complete the user's arguments of the Trainer, and return its other arguments.

    Args:
        config: `options.trainer` with its classes instantiated; changed in place.
        options: The options of the command; the precision is written there, too, for config.yaml.
        folder: The callback that writes config.yaml. All callbacks and loggers write into the folder of its run.
        automatic: Returns the precision if none is set.
        monitor: Name of the metric by which the best epoch is chosen.

    Raises:
        WrongUsage: A setting is not supported.
    """
    check_allowed(config)
    run = folder.run
    if config["precision"] is None:
        config["precision"] = automatic()
        options.trainer.precision = config["precision"]
    check_precision(config["precision"])
    loggers = [MetricsCSV(run), *_as_list(config["logger"])]
    attach(loggers, run)
    config["devices"], config["num_nodes"] = num_processes(config["devices"], config["num_nodes"])
    user_callbacks = _as_list(config["callbacks"])
    callbacks: list[Callback] = [
        folder,
        LoggedConfig(folder),
        StopAtOnce(),
        LimitWaits(),
    ]
    if run.command == "fit":
        callbacks += _callbacks_of_fit(run, options, monitor)
        _check_one_patience(callbacks, user_callbacks, monitor)
    else:
        callbacks += _callbacks_of_evaluation(run, options)
    callbacks += [Results(run), Skipped(run)]
    has_bar = any(isinstance(callback, ProgressBar) for callback in user_callbacks)
    if config["enable_progress_bar"] is not False and not has_bar:
        callbacks.append(ImageProgressBar())
    config["callbacks"] = [*user_callbacks, *callbacks]
    has_checkpoints = any(isinstance(callback, Checkpoint) for callback in config["callbacks"])
    return {
        "logger": loggers,
        "plugins": [AtomicCheckpointIO(), *cluster_environment()],
        "enable_checkpointing": has_checkpoints,
        **_FIXED,
    }


def _callbacks_of_fit(run: Run, options: Namespace, monitor: str) -> list[Callback]:
    callbacks: list[Callback] = [
        Rates(),
        Checkpoints(run, options.checkpoint_every_n_steps),
        Clock(run),
        WorseThanStart(),
    ]
    if options.report:
        callbacks.append(LiveReport(run))
    if options.patience is not None:
        callbacks.append(patience(options.patience, monitor))
    callbacks.append(AnswersWriter(run))
    return callbacks


def _check_one_patience(
    callbacks: Sequence[Callback], user_callbacks: Sequence[Callback], monitor: str
) -> None:
    """Make sure that `--patience` and the user's callbacks do not both stop a fit by the same number.

    Raises:
        WrongUsage: They do.
    """
    ours = {callback.state_key for callback in callbacks if isinstance(callback, EarlyStopping)}
    if any(callback.state_key in ours for callback in user_callbacks):
        raise WrongUsage(
            f"--patience ends a fit by {monitor}, as an EarlyStopping of trainer.callbacks does: omit one of the "
            "two"
        )


def _callbacks_of_evaluation(run: Run, options: Namespace) -> list[Callback]:
    callbacks: list[Callback] = []
    if options.tta:
        callbacks.append(AverageFlip())
    if run.command == "predict":
        callbacks.append(
            PredictionWriter(run, options.output, options.top_k, options.abstain_below)
        )
    if run.command == "test":
        callbacks.append(AnswersWriter(run))
    return callbacks


def check_allowed(config: Any) -> None:
    """Check the user's arguments of the Trainer, as far as that is possible without images and a network.

    Args:
        config: As for `complete`, or before its classes are instantiated.

    Raises:
        WrongUsage: A setting is not supported.
    """
    for name in _callback_names(config["callbacks"]):
        if name in _UNSUPPORTED_CALLBACKS:
            raise WrongUsage(
                f"trainer.callbacks {name} is not supported: remove it. A fit ends by epochs, steps or --patience"
            )
    check_strategy(config["strategy"])
    check_num_processes(config["devices"], config["accelerator"])
    for name in ("accumulate_grad_batches", "check_val_every_n_epoch"):
        if isinstance(num := config[name], int) and num < 1:
            raise WrongUsage(f"trainer.{name} must be at least 1, got {num}")
    interval = config["val_check_interval"]
    if interval is not None and not (isinstance(interval, int | float) and interval > 0):
        raise WrongUsage(
            f"trainer.val_check_interval must be a number of batches or a share of an epoch, not {interval}"
        )


def _callback_names(callbacks: Any) -> list[str]:
    """Return the names of the classes of callbacks, which may be settings that are not instantiated yet."""
    return [
        type(one).__name__ if isinstance(one, Callback) else str(one["class_path"]).split(".")[-1]
        for one in _as_list(callbacks)
    ]


def check_strategy(strategy: Any) -> None:
    """Check that a strategy has a complete network on each rank, and does not fork processes.

    Args:
        strategy: `trainer.strategy`: a name, an object, or the settings of an object that is not instantiated yet.

    Raises:
        WrongUsage: The strategy is not supported.
    """
    if isinstance(strategy, str):
        is_supported = strategy in _STRATEGIES
    elif isinstance(strategy, Strategy):
        is_ddp = isinstance(strategy, DDPStrategy) and lightning_private.starts_new_programs(
            strategy
        )
        is_supported = is_ddp or isinstance(strategy, SingleDeviceStrategy)
    else:
        is_supported = True  # settings of a class, which is checked again after it is instantiated
    if not is_supported:
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        raise WrongUsage(
            f"trainer.strategy {name} is not supported: take ddp, with one process per device. finetune parity shows "
            "pipeline, layer-wise and branch parallelism"
        )


def patience(num: int, monitor: str = MONITOR) -> EarlyStopping:
    """Return the callback that ends a fit after `num` validations without a higher value of a metric.

    Args:
        num: Number of validations.
        monitor: Name of the metric.
    """
    if num < 1:
        raise WrongUsage(f"--patience must be at least 1, got {num}")
    # not strict: a limit may end the run before its first validation
    return EarlyStopping(monitor, mode="max", patience=num, strict=False)


def make_ready(trainer: Trainer) -> Trainer:
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


def _as_list(value: Any) -> list[Any]:
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    return [] if value is None or isinstance(value, bool) else items
