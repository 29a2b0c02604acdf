"""When best.ckpt and last.ckpt are written, and that none is written of a fit that has diverged."""

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from colours import QUICKEST
from pytorch_lightning.callbacks import EarlyStopping
from tiny_module import trainer

from finetune.runs import deferred_checkpoints, model_checkpoint
from finetune.runs.checkpoint_io import AtomicCheckpointIO
from finetune.runs.folder import Run
from finetune.runs.lightning_callbacks import Limits, ended_by
from finetune.runs.metrics_csv import read_metrics
from finetune.runs.model_checkpoint import Checkpoints
from finetune.training.classifier import Classifier

RUN = Path("runs/fit/version_0")


def rows_of(path: Path) -> list[dict[str, str]]:
    """What each row holds: columns are added to those before."""
    return [{name: value for name, value in row.items() if value} for row in read_metrics(path)]


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, list[dict[str, str]]]]:
    """What was saved in which order: the name, the step, and the rows of steps.csv that were there by then."""
    found = []
    save_checkpoint = pl.Trainer.save_checkpoint

    def save(trainer: pl.Trainer, path: Path, *arguments: Any) -> None:
        save_checkpoint(trainer, path, *arguments)
        steps = path.parents[1] / "steps.csv"
        found.append((path.stem, trainer.global_step, rows_of(steps) if steps.exists() else []))

    monkeypatch.setattr(pl.Trainer, "save_checkpoint", save)
    return found


@pytest.fixture
def fit(cli: Callable[..., None], colours: Path) -> Callable[..., None]:
    options = ["--test_after_fit", "false", *QUICKEST]
    return lambda *more: cli("fit", colours, *options, *more)


@pytest.mark.slow
def test_what_a_checkpoint_has_done_is_in_steps_csv_before_it(fit, saved):
    """A kill right after the checkpoint would lose the row, which the resumed run does not write again."""
    options = ("--epochs", 2, "--trainer.log_every_n_steps", 1)
    fit(*options)
    saved.clear()
    fit(*options, "--checkpoint_every_n_steps", 1)
    runs = [rows_of(RUN.with_name(f"version_{i}") / "steps.csv") for i in range(2)]
    assert runs[0] == runs[1]  # and none is there twice
    assert [step for _, step, _ in saved] == list(range(1, 9))
    for _, step, written in saved:
        assert written == [row for row in runs[1] if int(row["step"]) < step]


@pytest.mark.parametrize("is_kept", [True, False])
def test_an_epoch_that_is_the_best_is_written_once_for_best_and_last(
    fit, monkeypatch, saved, is_kept
):
    # however slow this disk is, nothing waits
    monkeypatch.setattr(deferred_checkpoints, "QUICK", math.inf)
    # all epochs are kept, or the first alone
    monkeypatch.setattr(
        model_checkpoint, "lowest_acceptable", lambda *_: 0.0 if is_kept or not saved else 2.0
    )
    fit("--epochs", 3)
    best, last = (RUN / f"checkpoints/{name}.ckpt" for name in ("best", "last"))
    assert [name for name, *_ in saved] == (["best"] * 3 if is_kept else ["best", "last", "last"])
    assert best.samefile(last) == is_kept
    assert torch.load(best, weights_only=True)["epoch"] == (2 if is_kept else 0)


def test_a_validation_within_an_epoch_that_is_the_best_is_written_at_once(fit, monkeypatch, saved):
    monkeypatch.setattr(model_checkpoint, "lowest_acceptable", lambda *_: 0.0)
    fit("--trainer.val_check_interval", 2)
    assert saved[0][:2] == ("best", 2) and saved[-1][:2] == ("best", 4)


def test_a_kill_between_best_and_last_leaves_the_epoch_to_be_done_again(fit, monkeypatch):
    """Otherwise the best checkpoint would be lost, so last.ckpt is written second."""
    monkeypatch.setattr(deferred_checkpoints, "QUICK", math.inf)
    monkeypatch.setattr(model_checkpoint, "lowest_acceptable", lambda *_: 0.0)

    def link(source: Path, target: Path) -> None:
        raise OSError("killed")

    monkeypatch.setattr(model_checkpoint, "link", link)
    with pytest.raises(OSError, match="killed"):
        fit()
    assert [path.name for path in (RUN / "checkpoints").glob("*.ckpt")] == ["best.ckpt"]


def test_the_highest_accuracy_is_remembered_on_resume(fit, monkeypatch):
    seen = []

    def lowest_acceptable(highest: float, *_: Any) -> float:
        seen.append(highest)
        return highest

    monkeypatch.setattr(model_checkpoint, "lowest_acceptable", lowest_acceptable)
    fit("--lr", "1e-9")
    last = RUN / "checkpoints/last.ckpt"
    checkpoint = torch.load(last, weights_only=True)
    checkpoint["callbacks"]["Checkpoints"]["highest"] = 1.0
    AtomicCheckpointIO().save_checkpoint(checkpoint, last)
    fit("--lr", "1e-9", "--resume", "--epochs", 2)
    assert seen[0] < 1 and seen[1:] == [1.0]


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
        (2, -1, "trainer.max_epochs 2"),
        (4, 30, "trainer.max_steps 30"),
        (4, 29, "trainer.max_steps 29"),
        (None, 30, "trainer.max_steps 30"),
        (4, -1, ""),
        (None, -1, ""),
        (-1, -1, ""),
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
