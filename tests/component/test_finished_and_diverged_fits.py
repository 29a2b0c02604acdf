"""When a fit is finished, and that no checkpoint is written of one that has diverged."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from colours import QUICKEST

from finetune.fitting.fit import limit_reached
from finetune.runs.checkpoint_io import AtomicCheckpointIO
from finetune.training.classifier import Classifier


@pytest.fixture
def fit(cli: Callable[..., None], colours: Path) -> Callable[..., None]:
    options = ["--test_after_fit", "false", *QUICKEST]
    return lambda *more: cli("fit", colours, *options, *more)


# Limits


def test_patience_is_counted_anew_in_a_run_that_another_began(fit, tmp_path):
    unlearned = ["--lr", "1e-12", "--patience", 2]
    fit(*unlearned, "--epochs", 2)
    last = tmp_path / "runs/fit/version_0/checkpoints/last.ckpt"
    fit(*unlearned, "--epochs", 9, "--ckpt_path", last)
    rows = (tmp_path / "runs/fit/version_1/metrics.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == ["3", "4", "5"]  # the first, and two more


def test_a_validation_between_accumulated_batches_is_refused(fit):
    options = ["--trainer.accumulate_grad_batches", 3, "--trainer.val_check_interval", 2]
    with pytest.raises(ValueError, match=r"val_check_interval 2 .*accumulate_grad_batches 3"):
        fit(*options)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ((3, -1, None), "trainer.max_epochs 3"),
        ((4, 30, None), "trainer.max_steps 30"),
        ((None, 30, None), "trainer.max_steps 30"),
        ((4, -1, 2), "patience 2"),
        ((4, -1, None), ""),
        ((4, 31, 3), ""),
    ],
)
def test_a_run_is_finished_by_its_epochs_its_steps_or_its_patience(limits, words):
    progress = {"total": {}, "current": {"ready": 3, "started": 3, "processed": 3, "completed": 2}}
    checkpoint = {
        "loops": {"fit_loop": {"epoch_progress": progress}},
        "callbacks": {"Checkpoints": {"num_waited": 2}},
        "global_step": 30,
    }
    reached = limit_reached(checkpoint, *limits)
    assert words in reached and bool(words) == bool(reached)


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
    saved = []
    save_checkpoint = AtomicCheckpointIO.save_checkpoint

    def save(own: AtomicCheckpointIO, checkpoint: dict[str, Any], *arguments: Any) -> None:
        saved.extend(checkpoint["state_dict"].values())
        save_checkpoint(own, checkpoint, *arguments)

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", save)
    if is_stopped:
        interrupt_at(monkeypatch, 2)
    with pytest.raises(ValueError, match=r"diverged.*--lr .*1e\+25"):
        fit(*SGD, "--lr", "1e25", *options)
    assert all(value.isfinite().all() for value in saved)
