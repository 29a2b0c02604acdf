"""What a fit could not do is said before it trains."""

import pytest
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
    told = "--patience counts validations, and "
    told += f"the fit ends after {num} batches, before the first validation after {first}"
    with pytest.raises(ValueError, match=f"{told}: give more"):
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
