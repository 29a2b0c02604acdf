"""What fit makes of Lightning's trainer; test_cli.py, test_configs.py and test_resume.py go through all of it."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from conftest import QUICK
from pytorch_lightning.plugins.environments import SLURMEnvironment

from finetune.classifier import Classifier
from finetune.lightning_cli import run_lightning
from finetune.models import build


def test_under_slurm_the_script_requeues_not_lightning(colours, cli, monkeypatch):
    for name, value in {"NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "JOB_ID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(SLURMEnvironment, "detect", staticmethod(lambda: True))
    trainer = run_lightning(["fit", "--data.root", str(colours), *QUICK]).trainer
    environment = trainer._accelerator_connector.cluster_environment
    assert isinstance(environment, SLURMEnvironment) and not environment.auto_requeue


def test_a_run_that_goes_on_needs_no_weights_and_every_process_knows_its_checkpoint(colours, cli, tmp_path):
    weights = tmp_path / "weights.pt"
    torch.save(build("mobilenet_v3_small", 3).state_dict(), weights)
    options = ["fit", "--resume", "--data.root", str(colours), *QUICK, "--model.weights", str(weights)]
    cli(*options)
    weights.unlink()
    seen = []
    with patch.object(Classifier, "setup", lambda model, stage: seen.append((stage, model.trainer.ckpt_path))):
        cli(*options, "--trainer.max_epochs", 2)
    # known in `setup`, where processes on other machines tell whether they see the same checkpoint
    assert seen[0] == ("fit", Path("runs/fit/version_0/checkpoints/last.ckpt"))


def test_batch_norm_is_synchronised_once(colours, cli):
    with pytest.raises(ValueError, match="leave trainer.sync_batchnorm out"):
        cli("fit", "--data.root", colours, *QUICK, "--trainer.sync_batchnorm", "true")


def test_nothing_to_train_is_told(colours, cli):
    with pytest.raises(ValueError, match="nothing to train: trainer.max_epochs is 0"):
        cli("fit", "--config", "image_folder.yaml", "--data.root", colours, *QUICK, "--trainer.max_epochs", 0)
