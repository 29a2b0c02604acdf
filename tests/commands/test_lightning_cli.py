"""What fit makes of Lightning's trainer; test_cli.py, test_configs.py and test_resume.py go through all of it."""

import json
import os
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import yaml
from colours import QUICK
from pytorch_lightning.plugins.environments import SLURMEnvironment

from finetune.commands.lightning_cli import run_lightning
from finetune.models.backbones import build
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.folder import not_looked_at
from finetune.runs.metrics_csv import read_metrics
from finetune.runs.model_checkpoint import Checkpoints
from finetune.runs.resume import beginning
from finetune.system.messages import WrongUsage
from finetune.training.classifier import Classifier


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
    with pytest.raises(WrongUsage, match=r"leave trainer\.sync_batchnorm out"):
        cli("fit", "--data.root", colours, *QUICK, "--trainer.sync_batchnorm", "true")


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


def rate_in(config: Path) -> float:
    return yaml.safe_load(config.read_text())["model"]["optimizer"]["init_args"]["lr"]


def test_what_changed_since_a_run_began_is_told_and_config_yaml_says_what_holds(colours, cli, tmp_path, caplog):
    fit = ["fit", "--resume", "--data.root", colours, *QUICK, "--test_after_fit", "false"]
    sgd = ["--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr"]
    cli(*fit, *sgd, 0.02)
    assert f"nothing to go on with in {tmp_path}/runs/fit/version_N/checkpoints/last.ckpt: a new run" in caplog.text
    folder = tmp_path / "runs/fit/version_0"
    before = (folder / "config.yaml").read_text()
    adam = ["--model.optimizer", "torch.optim.Adam"]
    with pytest.raises(ValueError, match=r"go on with .*class_path .*Adam"):
        cli(*fit, *adam, "--trainer.max_epochs", 2)
    assert "is usual for" not in caplog.text  # nothing holds of it
    with pytest.raises(ValueError, match=r"in another order with data\.batch_size 8 \(was 16\)"):
        cli(*fit, *sgd, 0.02, "--trainer.max_epochs", 2, "--data.batch_size", 8)
    with pytest.raises(ValueError, match=r"in another order with data\.val_fraction 0\.2 \(was 0\.1\)"):
        cli(*fit, *sgd, 0.02, "--trainer.max_epochs", 2, "--data.val_fraction", 0.2)
    assert (folder / "config.yaml").read_text() == before
    cli(*fit, *sgd, 0.5, "--trainer.max_epochs", 2)
    assert "model.optimizer.lr stays 0.02, not 0.5" in caplog.text
    assert "changed: trainer.max_epochs 2 (was 1)" in caplog.text
    assert rate_in(folder / "config.yaml") == 0.02
    last = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
    assert [group["lr"] for group in last["optimizer_states"][0]["param_groups"]] == [0.02, 0.2]
    cli(*fit, *sgd, 0.02, "--trainer.max_epochs", 3, "--data.batch_size", 8, "--allow_changes", "true")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["data"]["init_args"]["batch_size"] == 8 and config["allow_changes"] is False


def test_a_run_began_from_another_says_so_and_its_config_starts_afresh(colours, cli, tmp_path):
    fit = ["fit", "--data.root", colours, *QUICK, "--test_after_fit", "false"]
    cli(*fit)
    last = tmp_path / "runs/fit/version_0/checkpoints/last.ckpt"
    with pytest.raises(ValueError, match=r"last\.ckpt leaves nothing to train, with trainer\.max_epochs 1: raise"):
        cli(*fit, "--ckpt_path", "runs/fit/version_0/checkpoints/last.ckpt")
    assert not (tmp_path / "runs/fit/version_1").exists()
    cli(*fit, "--ckpt_path", "runs/fit/version_0/checkpoints/last.ckpt", "--trainer.max_epochs", 2)
    for epochs in (2, 3):  # as it began, and gone on with
        run = tmp_path / "runs/fit/version_1"
        checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
        assert checkpoint["finetune"]["began_from"] == str(last)
        assert (run / "config.yaml").read_text().startswith(f"# It began from {last}\n")
        if epochs == 2:
            cli(*fit, "--resume", "--trainer.max_epochs", 3)
    assert checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"] == 3
    cli("fit", "--config", run / "config.yaml", "--trainer.max_epochs", 1)
    again = tmp_path / "runs/fit/version_2"
    assert "It began from" not in (again / "config.yaml").read_text()
    weights = [
        torch.load(p / "checkpoints/last.ckpt", weights_only=True)["state_dict"] for p in (last.parents[1], again)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_runs_with_another_name_are_told_of(tmp_path):
    for name in ("fit/mine", "fit/version_3", "moved"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "checkpoints/last.ckpt").touch()
    assert not_looked_at(tmp_path) == [tmp_path / "fit/mine", tmp_path / "moved"]
    (tmp_path / "fit/version_3/checkpoints/last.ckpt").unlink()
    told = beginning(Mock(), tmp_path, resume=True, ckpt_path=None).told
    assert f"{tmp_path}/fit/mine is not called version_N; {tmp_path}/moved is not called version_N" in told


def test_a_run_that_died_before_its_first_checkpoint_is_told_of(colours, cli, tmp_path, caplog):
    fit = ["fit", "--data.root", colours, *QUICK, "--test_after_fit", "false", "--resume"]
    cli(*fit)
    (tmp_path / "runs/fit/version_1").mkdir()
    with caplog.at_level("INFO", "finetune"):
        cli(*fit)
    assert "version_0 is finished, with trainer.max_epochs 1, and runs/fit/version_1 ended before its" in caplog.text
    assert caplog.text.count("nothing to go on with") == 1  # the first run
    assert (tmp_path / "runs/fit/version_2/checkpoints/last.ckpt").exists()


def test_a_prolonged_run_is_tested_again(colours, cli, tmp_path):
    fit = ["fit", "--resume", "--data.root", colours, *QUICK]
    cli(*fit)
    results = tmp_path / "runs/fit/version_0/test.json"
    results.write_text("of the best after one epoch")
    cli(*fit)  # finished: nothing is done
    assert results.read_text() == "of the best after one epoch"
    best = tmp_path / "runs/fit/version_0/checkpoints/best.ckpt"
    os.utime(best, (results.stat().st_mtime + 1,) * 2)  # as if the run had been prolonged, and killed before its test
    cli(*fit)
    assert "test/accuracy" in results.read_text()


def test_a_checkpoint_of_an_older_version_is_gone_on_with(colours, cli, tmp_path, caplog):
    fit = ["fit", "--data.root", colours, *QUICK, "--test_after_fit", "false", "--resume"]
    cli(*fit)
    last = tmp_path / "runs/fit/version_0/checkpoints/last.ckpt"
    checkpoint = torch.load(last, weights_only=True)
    checkpoint["finetune"] |= {"seen": None, "data_fingerprint": "of another kind"}
    torch.save(checkpoint, last)
    with caplog.at_level("INFO", "finetune"):
        cli(*fit, "--trainer.max_epochs", 2)
    assert "an older version, does not say what it was trained on: not checked" in caplog.text
    checkpoint["finetune"] |= {"seen": torch.load(last, weights_only=True)["finetune"]["seen"]}
    torch.save(checkpoint, last)
    with pytest.raises(ValueError, match="in another order with other training pictures"):
        cli(*fit, "--trainer.max_epochs", 3)


def test_a_finished_run_is_tested_at_its_end_and_its_last_is_its_best(colours, cli, tmp_path):
    fit = ["fit", "--data.root", colours, *QUICK, "--data.val_fraction", "0", "--trainer.max_epochs", 2]
    cli(*fit, "--test_after_fit", "false")
    run = tmp_path / "runs/fit/version_0"
    best, last = run / "checkpoints/best.ckpt", run / "checkpoints/last.ckpt"
    best.unlink()  # as after the first epoch, and killed between the two files at the end of the second
    other = ["--trainer.default_root_dir", "other"]
    cli(*fit[:-1], 1, *other, "--test_after_fit", "false")
    best.write_bytes((tmp_path / "other/fit/version_0/checkpoints/best.ckpt").read_bytes())
    os.utime(best, (last.stat().st_mtime - 9,) * 2)
    cli(*fit, "--resume")
    assert read_checkpoint(best)["global_step"] == read_checkpoint(last)["global_step"]
    (row,) = [row for row in read_metrics(run / "metrics.csv") if row.get("test/loss")]
    cli(*fit, *other)
    (whole,) = [row for row in read_metrics("other/fit/version_1/metrics.csv") if row.get("test/loss")]
    assert (row["step"], row["epoch"], row["test/loss"]) == (whole["step"], whole["epoch"], whole["test/loss"])
    cli(*fit[:-1], 3, "--resume")
    (row,) = [row for row in read_metrics(run / "metrics.csv") if row.get("test/loss")]  # that of before is gone
    assert int(row["step"]) == read_checkpoint(last)["global_step"]


def test_a_run_that_ends_before_its_first_step_is_told(colours, cli):
    with pytest.raises(ValueError, match=r"nothing was trained in .*version_0: a limit ended it before its first step"):
        cli("fit", "--data.root", colours, *QUICK, "--trainer.max_time", "00:00:00:00")


def test_a_checkpoint_that_is_not_there_is_told_before_there_is_a_run(colours, cli, tmp_path):
    with pytest.raises(FileNotFoundError, match="nope.ckpt"):
        cli("fit", "--data.root", colours, *QUICK, "--ckpt_path", "nope.ckpt")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--model.optimizer.lr", "-1", r"^model\.optimizer: Invalid learning rate: -1\.0$"),
        ("--trainer.strategy", "foo", r"^trainer: You selected an invalid strategy name"),
        ("--seed_everything", "-1", r"^--seed_everything must be from 0 to 4,294,967,295, not -1$"),
    ],
)
def test_what_libraries_say_of_a_value_is_wrong_usage(colours, cli, option, value, message):
    with pytest.raises(WrongUsage, match=message):
        cli("fit", "--data.root", colours, *QUICK, option, value)
