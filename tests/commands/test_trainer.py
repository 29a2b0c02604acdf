"""Which arguments the Trainer gets in addition to the user's, and which are unsupported."""

from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import pytorch_lightning as pl
from colours import QUICKEST
from pytorch_lightning.callbacks import ModelSummary, ProgressBar, TQDMProgressBar
from pytorch_lightning.plugins.environments import LightningEnvironment, SLURMEnvironment
from pytorch_lightning.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

from finetune import lightning_private
from finetune.commands.lightning_cli import run_lightning
from finetune.commands.trainer import check_strategy, make_ready
from finetune.distributed.launch import cluster_environment, has_launcher
from finetune.distributed.ranks import drop_stale_ranks
from finetune.distributed.signals import is_rank_zero
from finetune.runs.metrics_csv import MetricsCSV
from finetune.runs.model_checkpoint import Checkpoints
from finetune.system.messages import WrongUsage
from finetune.training.progress_bar import ImageProgressBar


def test_under_slurm_the_script_requeues_not_lightning(colours, cli, monkeypatch):
    for name in ("NTASKS", "STEP_NUM_TASKS", "JOB_ID"):
        monkeypatch.setenv(f"SLURM_{name}", "1")
    for name in ("PROCID", "LOCALID", "NODEID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    monkeypatch.setattr(SLURMEnvironment, "detect", staticmethod(lambda: True))
    trainer = made(colours)
    environment = trainer._accelerator_connector.cluster_environment
    assert isinstance(environment, SLURMEnvironment) and not environment.auto_requeue


def test_in_a_batch_script_without_srun_lightning_starts_the_processes(monkeypatch):
    """Its job may have several tasks, but this is the only process: one that waited for others would wait for ever."""
    monkeypatch.setattr(SLURMEnvironment, "detect", staticmethod(lambda: True))
    for name, value in {
        "NTASKS": "2",
        "NTASKS_PER_NODE": "2",
        "PROCID": "0",
        "LOCALID": "0",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    (environment,) = cluster_environment()
    assert isinstance(environment, LightningEnvironment) and not has_launcher()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    (environment,) = cluster_environment()
    assert isinstance(environment, SLURMEnvironment) and has_launcher()


@pytest.mark.parametrize("port", [None, "1234"])
def test_ranks_that_come_with_a_port_are_a_launcher_s(monkeypatch, port):
    """That stale ones neither silence a run nor let it wait: test_ends.py."""
    for name, value in {
        "RANK": "1",
        "LOCAL_RANK": "1",
        **({"MASTER_PORT": port} if port else {}),
    }.items():
        monkeypatch.setenv(name, value)
    drop_stale_ranks()
    assert is_rank_zero() == (port is None)


def made(colours: Path, *options: str) -> pl.Trainer:
    """The Trainer of a fit that does not begin."""
    with patch("finetune.commands.lightning_cli.fit"):
        return run_lightning(["fit", "--data.root", str(colours), *QUICKEST, *options]).trainer


def test_a_strategy_by_class_is_refused_by_what_it_does():
    for supported in (
        "auto",
        "ddp",
        None,
        DDPStrategy(),
        DDPStrategy(timeout=timedelta(seconds=5)),
    ):
        check_strategy(supported)
    for strategy in (ModelParallelStrategy(), FSDPStrategy(), DDPStrategy(start_method="spawn")):
        with pytest.raises(WrongUsage, match=type(strategy).__name__):
            check_strategy(strategy)


@pytest.mark.slow
def test_callbacks_and_loggers_of_the_user_are_next_to_ours(colours, cli):
    own = ["--trainer.callbacks", "[{class_path: pytorch_lightning.callbacks.ModelSummary}]"]
    kinds = [
        type(callback) for callback in made(colours, *own, "--trainer.logger", "false").callbacks
    ]
    # which is last
    assert (
        kinds.count(ModelSummary) == kinds.count(ImageProgressBar) == 1 and kinds[-1] is Checkpoints
    )
    for logger in ("true", "false"):
        assert [type(one) for one in made(colours, "--trainer.logger", logger).loggers] == [
            MetricsCSV
        ]


@pytest.mark.parametrize(
    ("options", "bars"),
    [
        (["--trainer.callbacks+=pytorch_lightning.callbacks.TQDMProgressBar"], [TQDMProgressBar]),
        (["--trainer.enable_progress_bar", "false"], []),
        ([], [ImageProgressBar]),
    ],
)
def test_one_progress_bar_at_most(colours, cli, options, bars):
    shown = [
        callback
        for callback in made(colours, *options).callbacks
        if isinstance(callback, ProgressBar)
    ]
    assert [type(bar) for bar in shown] == bars


def test_steps_end_a_run_as_epochs_do(colours, cli):
    """Lightning would treat an ended epoch as unfinished, and skip the next one on resume."""
    trainer = made(colours, "--trainer.max_steps", "3")
    assert trainer.max_steps == 3 and not trainer.fit_loop._iteration_based_training()
    plain = pl.Trainer(max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False)
    assert plain.fit_loop._iteration_based_training()  # the control


@pytest.mark.slow
def test_a_run_that_begins_anew_chooses_its_own_precision(colours, cli, tmp_path):
    """And not that of the finished run before it, which `--resume` has looked at."""
    run_lightning(["fit", "--data.root", str(colours), *QUICKEST, "--trainer.precision", "64-true"])
    unsaid = ["--resume", "--trainer.precision", "null"]
    own = ("32-true", "bf16-mixed")
    assert (
        made(colours, *unsaid).precision
        == made(colours, *unsaid, "--trainer.max_epochs", "2").precision
        == "64-true"
    )
    (tmp_path / "runs/fit/version_1").mkdir()  # it ended before its first checkpoint
    assert made(colours, *unsaid).precision in own
    # prolonged: version_0 continues
    assert made(colours, *unsaid, "--trainer.max_epochs", "2").precision == "64-true"


def test_devices_do_not_wait_at_every_step_for_word_of_a_signal(colours, cli, monkeypatch):
    """A broadcast that Lightning reads from the device; ours go through the CPUs."""
    name = "_broadcast_sigterm_tensor"
    plain = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    # else Lightning has another name for it
    assert callable(getattr(plain.fit_loop.epoch_loop, name))
    trainer = made(colours, "--trainer.devices", "2")
    broadcast = getattr(trainer.fit_loop.epoch_loop, name)
    assert broadcast is lightning_private._do_nothing
    # then Lightning's handlers stand
    plain._accelerator_connector.cluster_environment.auto_requeue = True
    assert name not in vars(make_ready(plain).fit_loop.epoch_loop)
