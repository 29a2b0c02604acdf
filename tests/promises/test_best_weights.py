"""The weights that a fit from a fitted head keeps: those before training are a candidate."""

import pytest
import torch
from colours import QUICKEST
from processes import finetune
from promise import promise

from finetune.runs import model_checkpoint
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.folder import versions
from finetune.runs.record import read_run

PROBE = ("--model.head_init", "probe", "--trainer.precision", "64-true")
# a rate at which the network forgets everything
RUIN = ("--model.optimizer", "SGD", "--model.optimizer.lr", "1", "--trainer.max_epochs", "3")


def checkpoint(name: str) -> dict:
    return read_checkpoint(versions("runs", "fit")[-1] / f"checkpoints/{name}.ckpt")


def keep_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checkpoint, "lowest_acceptable", lambda highest, num: 0.0)


@promise("best-weights", controls=[keep_the_end])
def test_a_fit_that_harms_keeps_the_weights_before_training(cli, colours, capsys):
    cli("fit", colours, *QUICKEST, *PROBE, *RUIN, "--data.val_fraction", 0.4)
    run = versions("runs", "fit")[-1]
    best, last = checkpoint("best"), checkpoint("last")
    assert best["global_step"] == 0 < last["global_step"]
    kept = read_run(run).facts.best
    assert (kept.epoch, kept.weights) == (0, "before training")
    printed = capsys.readouterr().out
    assert f"best.ckpt: {kept.why}" in printed and "fitted on 22 validation images" in printed
    # its validation is that of the record
    cli("validate", run, "--data.root", colours, "--data.num_workers", 0)
    assert f"validation accuracy {kept.result.value_text}" in capsys.readouterr().out


@promise("best-weights")
def test_a_fit_that_does_not_harm_keeps_an_epoch(cli, colours):
    cli("fit", colours, *QUICKEST, *PROBE, "--trainer.max_epochs", 1)
    best, last = checkpoint("best"), checkpoint("last")
    assert read_run(versions("runs", "fit")[-1]).facts.best.epoch == 1
    assert all(value.equal(last["state_dict"][name]) for name, value in best["state_dict"].items())


@pytest.mark.slow
def test_batch_norm_keeps_its_statistics_with_a_fitted_head(cli, colours):
    network = ("--model.backbone", "timm/test_resnet", "--data.image_size", 32)
    cli("fit", colours, *QUICKEST, *PROBE, *network, *RUIN)
    before, after = (checkpoint(name)["state_dict"] for name in ("best", "last"))
    statistics = [name for name in after if name.endswith(("running_mean", "running_var"))]
    assert statistics and all(after[name].equal(before[name]) for name in statistics)


@pytest.mark.slow
def test_two_devices_keep_the_weights_of_one(cli, colours, tmp_path):
    fit = ("fit", colours, *QUICKEST, *PROBE, *RUIN)
    cli(*fit)
    one = checkpoint("best")
    process = finetune(*fit, "--trainer.devices", 2, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    two = checkpoint("best")
    assert two["global_step"] == one["global_step"]
    for name, value in one["state_dict"].items():
        torch.testing.assert_close(two["state_dict"][name], value, rtol=0, atol=1e-10)


def test_without_validation_the_last_weights_are_kept_and_tested_once(cli, colours, caplog):
    fit = ("fit", colours, *QUICKEST, *PROBE, "--data.val_fraction", 0)
    cli(*fit)
    run = versions("runs", "fit")[-1]
    assert read_run(run).facts.best is None
    written = (run / "test.json").stat().st_mtime_ns
    with caplog.at_level("INFO", logger="finetune"):
        cli(*fit, "--resume")
    assert "is finished" in caplog.text and "val/accuracy" not in caplog.text
    assert (run / "test.json").stat().st_mtime_ns == written
