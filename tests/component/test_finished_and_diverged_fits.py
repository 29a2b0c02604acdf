"""When a fit is finished, and that no checkpoint is written of one that has diverged."""

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from colours import QUICKEST
from pytorch_lightning.callbacks import EarlyStopping
from tiny_module import trainer

from finetune.runs.folder import Run
from finetune.runs.lightning_callbacks import Limits, ended_by
from finetune.runs.model_checkpoint import Checkpoints
from finetune.training.classifier import Classifier


@pytest.fixture
def fit(cli: Callable[..., None], colours: Path) -> Callable[..., None]:
    options = ["--test_after_fit", "false", *QUICKEST]
    return lambda *more: cli("fit", colours, *options, *more)


# Limits


@pytest.mark.parametrize(("is_own", "is_left"), [(True, True), (False, False)])
def test_early_stopping_begins_anew_in_a_run_that_another_began(tmp_path, is_own, is_left):
    run = Run(tmp_path, "fit")
    run.choose()
    before = EarlyStopping("val/accuracy", mode="max", patience=2)
    now = EarlyStopping("val/accuracy", mode="max", patience=9)
    fitting = trainer(tmp_path, now)
    fitting.state.fn = "fit"
    fitting.ckpt_path = str(run.checkpoint("last") if is_own else tmp_path / "last.ckpt")
    checkpoint = {"callbacks": {now.state_key: before.state_dict()}}
    Checkpoints(run).on_load_checkpoint(fitting, None, checkpoint)
    assert (now.state_key in checkpoint["callbacks"]) == is_left
    if is_left:
        assert checkpoint["callbacks"][now.state_key]["patience"] == 9


@pytest.mark.parametrize(
    ("max_epochs", "max_steps", "words"),
    [
        (3, -1, "trainer.max_epochs 3"),
        (4, 30, "trainer.max_steps 30"),
        (None, 30, "trainer.max_steps 30"),
        (4, -1, ""),
        (4, 31, ""),
    ],
)
def test_a_run_is_finished_by_its_epochs_or_its_steps(max_epochs, max_steps, words):
    progress = {"total": {}, "current": {"ready": 3, "started": 3, "processed": 3, "completed": 2}}
    checkpoint = {"loops": {"fit_loop": {"epoch_progress": progress}}, "global_step": 30}
    ended = ended_by(checkpoint, Limits(max_epochs=max_epochs, max_steps=max_steps))
    assert words in ended and bool(words) == bool(ended)


# Fits that diverge

SGD = ["--optimizer", "SGD", "--data.val_fraction", 0]


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    training_step = Classifier.training_step

    def stepped(self: Classifier, *arguments: Any) -> Any:
        if self.trainer.global_step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return training_step(self, *arguments)

    monkeypatch.setattr(Classifier, "training_step", stepped)


@pytest.mark.parametrize(
    ("options", "is_stopped"),
    [(["--checkpoint_every_n_steps", 1], False), ([], True), (["--trainer.max_steps", 3], False)],
)
def test_no_checkpoint_is_written_of_a_step_that_has_diverged(
    fit, monkeypatch, options, is_stopped
):
    losses = []
    save_checkpoint = pl.Trainer.save_checkpoint

    def save(trainer: pl.Trainer, *arguments: Any) -> None:
        losses.append(float(trainer.callback_metrics["train/loss"]))
        save_checkpoint(trainer, *arguments)

    monkeypatch.setattr(pl.Trainer, "save_checkpoint", save)
    if is_stopped:
        interrupt_at(monkeypatch, 2)
    with pytest.raises(ValueError, match=r"diverged.*--lr .*1e\+25"):
        fit(*SGD, "--lr", "1e25", *options)
    assert all(map(math.isfinite, losses))
