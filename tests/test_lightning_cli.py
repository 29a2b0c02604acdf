"""What fit makes of Lightning's trainer; test_cli.py, test_configs.py and test_resume.py go through all of it."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from conftest import QUICK
from pytorch_lightning.plugins.environments import SLURMEnvironment

from finetune.checkpoints import Checkpoints, read_checkpoint
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


def test_batch_norm_is_synchronised_once(colours, cli, capsys):
    with pytest.raises(SystemExit) as caught:
        cli("fit", "--data.root", colours, *QUICK, "--trainer.sync_batchnorm", "true")
    assert caught.value.code == 2 and "leave trainer.sync_batchnorm out" in capsys.readouterr().err


def test_nothing_to_train_is_told(colours, cli):
    with pytest.raises(ValueError, match="nothing to train: trainer.max_epochs is 0"):
        cli("fit", "--config", "image_folder.yaml", "--data.root", colours, *QUICK, "--trainer.max_epochs", 0)


def test_a_fit_tests_the_best_checkpoint(colours, cli, tmp_path):
    """Here that of the first epoch of three; the control: the last one's result is another."""
    original = Checkpoints.on_validation_end

    def then_nothing_is_better(self, trainer, pl_module):
        original(self, trainer, pl_module)
        self.best_score = (2.0, 0.0)

    with patch.object(Checkpoints, "on_validation_end", then_nothing_is_better):
        cli("fit", "--data.root", colours, *QUICK, "--trainer.max_epochs", 3)
    folder = tmp_path / "runs/fit/version_0"
    assert [read_checkpoint(folder / f"checkpoints/{name}.ckpt")["epoch"] for name in ("best", "last")] == [0, 2]
    tested = {}
    for i, name in enumerate(("best", "last")):
        options = ["--data.num_workers", 0, "--trainer.accelerator", "cpu"]
        cli("test", "--ckpt_path", folder / f"checkpoints/{name}.ckpt", *options)
        tested[name] = json.loads((tmp_path / f"runs/test/version_{i}/test.json").read_text())["test/loss"]
    result = json.loads((folder / "test.json").read_text())
    assert result["test/loss"] == tested["best"] != tested["last"]
    assert result["checkpoint"].endswith("best.ckpt")
