"""The private names of PyTorch Lightning that this package uses, one function each.

Private names may change with any release, and no other module uses them. All functions are written for Lightning 2.6.
"""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

    import pytorch_lightning as pl
    from pytorch_lightning.strategies import DDPStrategy


def _do_nothing(*args: Any) -> None:
    pass


def _return_false(*args: Any) -> bool:
    return False


# Processes and signals


def disable_signal_handlers(trainer: "pl.Trainer") -> None:
    """Keep Lightning from installing signal handlers.

    They would stay in place until training begins. On several devices the SIGTERM handler waits for all of them.
    """
    trainer._signal_connector.register_signal_handlers = _do_nothing  # type: ignore[method-assign]


def disable_sigterm_broadcast(trainer: "pl.Trainer") -> None:
    """Disable the broadcast at every step of whether a rank has received SIGTERM.

    Reading its result waits until the GPU has finished its queue. `SignalFlag` communicates on CPUs instead.
    """
    loop = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = _do_nothing  # type: ignore[method-assign]


def is_subprocess_launcher(launcher: Any) -> bool:
    """Return whether a strategy's launcher starts the script again for each device."""
    from pytorch_lightning.strategies.launchers import subprocess_script

    return isinstance(launcher, subprocess_script._SubprocessScriptLauncher)


def set_process_observer(observe: "Callable[[list[subprocess.Popen]], None]") -> None:
    """Replace the function that watches the processes of the other ranks.

    Lightning's own kills rank 0 as soon as another rank fails, even while rank 0 still writes and logs.
    """
    from pytorch_lightning.strategies.launchers import subprocess_script

    subprocess_script._launch_process_observer = observe  # type: ignore[assignment]


def process_group_timeout(strategy: Any) -> timedelta | None:
    """Return the timeout of a strategy's process group, None for a strategy without one."""
    return getattr(strategy, "_timeout", None)


def set_ddp_argument(strategy: "DDPStrategy", name: str, value: Any) -> None:
    """Set an argument of DistributedDataParallel.

    A strategy accepts them only in its constructor, which may already have run.
    """
    strategy._ddp_kwargs[name] = value


# Where the loops are


def count_ended_epochs(trainer: "pl.Trainer") -> None:
    """Count an epoch as completed at its end also in a run with `max_steps`.

    Otherwise Lightning treats it as unfinished on resume, and skips the next epoch.
    """
    trainer.fit_loop._iteration_based_training = _return_false  # type: ignore[method-assign]


def is_accumulating(trainer: "pl.Trainer") -> bool:
    """Return whether gradients were computed that no optimizer step has used yet."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def is_validation_next(trainer: "pl.Trainer") -> bool:
    """Return whether validation follows the current batch."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    return trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def num_logged_steps(trainer: "pl.Trainer") -> int:
    """Return the step that Lightning logs the next metrics with."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


# Metrics and checkpoints


def log_batch(trainer: "pl.Trainer") -> None:
    """Log the metrics of the current batch now. Lightning logs them only after the hooks of the callbacks."""
    trainer._logger_connector.on_batch_end()
    trainer._logger_connector.update_train_step_metrics()


def pending_metrics(trainer: "pl.Trainer", is_epoch_end: bool) -> Mapping[str, Any]:
    """Return the metrics that Lightning will log after the hooks of the callbacks."""
    connector = trainer._logger_connector
    if is_epoch_end or connector.should_update_logs:
        return connector.metrics["log"]
    return {}


def dump_checkpoint(trainer: "pl.Trainer") -> dict[str, Any]:
    """Return a checkpoint without writing it. `trainer.save_checkpoint` would write it at once."""
    return trainer._checkpoint_connector.dump_checkpoint()


# Modules and callbacks


def has_trainer(module: "pl.LightningModule") -> bool:
    """Return whether a Trainer runs this module. The public attribute `trainer` raises an error if none does."""
    return module._trainer is not None
