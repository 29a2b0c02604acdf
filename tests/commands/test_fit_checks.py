"""Unsupported settings of a fit are reported before it trains."""

from pathlib import Path

import pytest
import torch
import yaml
from colours import QUICKEST


@pytest.mark.parametrize(
    ("options", "num", "first"),
    [
        (["--trainer.max_steps", 3], 3, 4),  # of 4 batches an epoch
        (["--trainer.max_steps", 1, "--trainer.accumulate_grad_batches", 3], 3, 4),
        (["--trainer.max_epochs", 2, "--trainer.check_val_every_n_epoch", 3], 8, 12),
        (["--trainer.max_steps", 1, "--trainer.val_check_interval", 0.5], 1, 2),
    ],
)
def test_patience_needs_a_validation_before_the_end(colours, cli, tmp_path, options, num, first):
    reported = "--patience counts validations, and "
    reported += f"the fit ends after {num} batches, before the first validation after {first}"
    with pytest.raises(ValueError, match=f"{reported}: set more"):
        cli("fit", "--data.root", colours, *QUICKEST, "--patience", 1, *options)
    assert not (tmp_path / "runs/fit").exists()


def test_a_run_is_not_begun_from_what_it_would_not_follow(colours, cli, tmp_path, run_to_go_on):
    fit = ["fit", "--data.root", colours, *QUICKEST, "--test_after_fit", "false"]
    path = "runs/fit/version_0/checkpoints/last.ckpt"
    more = [*fit, "--ckpt_path", path, "--trainer.max_epochs", 2]
    hint = f"use the same, or begin with its weights alone: --weights {path}"
    with pytest.raises(
        ValueError, match=f'continues, with model.class_weights null, not "balanced": {hint}'
    ):
        cli(*more, "--model.class_weights", "balanced")
    with pytest.raises(
        ValueError,
        match=f"continues, with another optimizer than SGD, one without dampening: {hint}",
    ):
        cli(*more, "--model.optimizer", "torch.optim.SGD")
    assert not (tmp_path / "runs/fit/version_1").exists()


def test_weights_of_classes_in_a_file_become_values_of_the_run(colours, cli, tmp_path):
    fit = ["fit", "--data.root", colours, *QUICKEST, "--test_after_fit", "false"]
    with pytest.raises(ValueError, match=r"there is no class 'rde'; did you mean 'red'\?$"):
        cli(*fit, "--class_weights", "rde:2")
    assert not (tmp_path / "runs/fit").exists()
    Path("weights.yaml").write_text("red: 2\n")
    cli(*fit, "--class_weights", "weights.yaml")
    run = Path("runs/fit/version_0")
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["class_weights"] == {
        "red": 2.0
    }
    Path("weights.yaml").unlink()
    cli("fit", "--resume", run, "--trainer.max_epochs", 2)
    state = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert state["hyper_parameters"]["class_weights"] == {"red": 2.0}
    assert state["state_dict"]["class_weight"].tolist() == [1, 1, 2]
