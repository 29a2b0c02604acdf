"""A diverged run ends, and none of its weights are kept."""

import math
import signal

import pytest
import pytorch_lightning as pl
from colours import QUICKEST


@pytest.mark.parametrize(
    ("options", "is_stopped", "num"),
    [
        (["--checkpoint_every_n_steps", 1], lambda trainer: False, 1),
        ([], lambda trainer: trainer.global_step == 3, 0),
        (["--data.val_fraction", 0.1], lambda trainer: trainer.validating, 0),
        (["--trainer.max_steps", 3], lambda trainer: False, 0),
    ],
)
def test_no_checkpoint_is_written_of_a_step_that_has_diverged(
    colours, cli, monkeypatch, options, is_stopped, num
):
    """Whatever it would have been for: every n steps, a signal in training or in validation, a limit."""
    losses = []

    def save(trainer, *arguments, original=pl.Trainer.save_checkpoint):
        losses.append(float(trainer.callback_metrics["train/loss"]))
        original(trainer, *arguments)

    monkeypatch.setattr(pl.Trainer, "save_checkpoint", save)
    agreed = "finetune.runs.model_checkpoint.SignalFlag.agreed"
    monkeypatch.setattr(agreed, lambda self, trainer: signal.SIGTERM if is_stopped(trainer) else 0)
    sgd = [
        "--model.optimizer",
        "torch.optim.SGD",
        "--model.optimizer.lr",
        "1e25",
        "--data.val_fraction",
        0,
    ]
    reported = r"train/loss is (nan|inf) .* diverged.*--lr .*1e\+25"
    with pytest.raises(ValueError, match=reported):
        cli("fit", "--data.root", colours, *QUICKEST, *sgd, *options)
    assert len(losses) >= num and all(map(math.isfinite, losses))
