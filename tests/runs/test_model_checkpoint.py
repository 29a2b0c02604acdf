"""When best.ckpt is written, and how often last.ckpt."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from colours import QUICKEST
from data_files import nowhere
from pytorch_lightning.callbacks import EarlyStopping

from finetune.runs import deferred_checkpoints
from finetune.runs.metrics_csv import read_metrics
from finetune.runs.model_checkpoint import Checkpoints
from finetune.training.task import SingleLabel


def validated(callback: Checkpoints, *accuracies: float) -> list[bool]:
    """For each accuracy on 30 images: whether it becomes the best checkpoint so far."""
    kept = []
    for accuracy in accuracies:
        trainer = SimpleNamespace(
            state=SimpleNamespace(fn="fit"),
            sanity_checking=False,
            limit_val_batches=3,
            callback_metrics={
                "val/accuracy": torch.tensor(accuracy),
                "val/loss": torch.tensor(1.0),
            },
            datamodule=SimpleNamespace(splits={"val": nowhere(300)}, batch_size=10),
            fit_loop=SimpleNamespace(
                epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(is_last_batch=True))
            ),
        )
        callback.on_validation_end(trainer, SimpleNamespace(task=SingleLabel(("a", "b"))))
        kept.append(callback._is_best)
    return kept


@pytest.fixture
def callback(run) -> Checkpoints:
    return Checkpoints(run)


def test_best_is_the_last_that_can_not_be_distinguished_from_the_highest(callback):
    # Of 30 images the standard error of 0.6 is 0.089, that of 0.5 is 0.091.
    accuracies = [0.5, 0.42, 0.4, 0.6, 0.52, 0.5, 0.6]
    assert validated(callback, *accuracies) == [True, True, False, True, True, False, True]


def test_the_highest_is_remembered_over_a_restart(callback, tmp_path):
    assert validated(callback, 0.5, 0.45) == [True, True]
    torch.save(callback.state_dict(), tmp_path / "state")
    restarted = Checkpoints(callback.run)
    restarted.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert validated(restarted, 0.38, 0.42) == [False, True]
    # Control: without its state the first one after a restart would be the best.
    assert validated(Checkpoints(callback.run), 0.1) == [True]


@pytest.mark.parametrize(
    ("fn", "is_own", "is_left"), [("fit", True, True), ("fit", False, False), ("test", False, True)]
)
def test_early_stopping_begins_anew_in_a_run_that_another_began(
    callback, tmp_path, fn, is_own, is_left
):
    stopping = EarlyStopping("val/accuracy", mode="max", patience=2)
    path = callback.run.checkpoint("last") if is_own else tmp_path / "other/last.ckpt"
    trainer = SimpleNamespace(
        state=SimpleNamespace(fn=fn), ckpt_path=str(path), callbacks=[stopping]
    )
    checkpoint = {"callbacks": {stopping.state_key: stopping.state_dict()}}
    callback.on_load_checkpoint(trainer, None, checkpoint)
    assert (stopping.state_key in checkpoint["callbacks"]) == is_left


def rows_of(path: Path) -> list[dict[str, str]]:
    """What each row holds: columns are added to those before."""
    return [{name: value for name, value in row.items() if value} for row in read_metrics(path)]


@pytest.fixture
def saved(monkeypatch) -> list[tuple[str, int, list[dict[str, str]]]]:
    """What was saved in which order: the name, the step, and the rows of steps.csv that were there by then."""
    found = []

    def save(trainer, path, *arguments, original=pl.Trainer.save_checkpoint):
        original(trainer, path, *arguments)
        steps = path.parents[1] / "steps.csv"
        found.append((path.stem, trainer.global_step, rows_of(steps) if steps.exists() else []))

    monkeypatch.setattr(pl.Trainer, "save_checkpoint", save)
    return found


@pytest.mark.slow
def test_what_a_checkpoint_has_done_is_in_steps_csv_before_it(colours, cli, tmp_path, saved):
    """A kill right after the checkpoint would lose the row, which the resumed run does not write again."""
    fit = [
        "fit",
        "--data.root",
        colours,
        *QUICKEST,
        "--trainer.max_epochs",
        2,
        "--trainer.log_every_n_steps",
        1,
    ]
    fit += ["--test_after_fit", "false"]
    cli(*fit)
    saved.clear()
    cli(*fit, "--checkpoint_every_n_steps", 1)
    runs = [rows_of(tmp_path / f"runs/fit/version_{i}/steps.csv") for i in range(2)]
    assert runs[0] == runs[1]  # and none is there twice
    assert [step for _, step, _ in saved] == list(range(1, 9))
    for _, step, written in saved:
        assert written == [row for row in runs[1] if int(row["step"]) < step]


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [True, False])
def test_an_epoch_that_is_kept_is_written_once_for_best_and_last(
    colours, cli, tmp_path, monkeypatch, saved, is_kept
):
    # however slow this disk is, nothing waits
    monkeypatch.setattr(deferred_checkpoints, "QUICK", math.inf)
    # All are kept, or the first alone.
    lowest = "finetune.runs.model_checkpoint.lowest_acceptable"
    monkeypatch.setattr(lowest, lambda *_: 0.0 if is_kept or not saved else 2.0)
    cli(
        "fit",
        "--data.root",
        colours,
        *QUICKEST,
        "--trainer.max_epochs",
        3,
        "--test_after_fit",
        "false",
    )
    best, last = (
        tmp_path / f"runs/fit/version_0/checkpoints/{name}.ckpt" for name in ("best", "last")
    )
    assert [name for name, *_ in saved] == (["best"] * 3 if is_kept else ["best", "last", "last"])
    assert best.samefile(last) == is_kept
    assert torch.load(best, weights_only=True)["epoch"] == (2 if is_kept else 0)


def test_a_validation_within_an_epoch_is_kept_at_once(colours, cli, monkeypatch, saved):
    monkeypatch.setattr("finetune.runs.model_checkpoint.lowest_acceptable", lambda *_: 0.0)
    options = [
        "--trainer.max_epochs",
        1,
        "--trainer.val_check_interval",
        2,
        "--test_after_fit",
        "false",
    ]
    cli("fit", "--data.root", colours, *QUICKEST, *options)
    assert saved[0][:2] == ("best", 2) and saved[-1][:2] == ("best", 4)


def test_a_kill_between_the_two_leaves_the_last_epoch_to_be_done_again(callback, monkeypatch):
    """Otherwise the best checkpoint would be lost, so last.ckpt is written second."""
    written, linked = [], []

    def save(path):
        path.parent.mkdir(exist_ok=True)
        path.touch()
        written.append(path.stem)

    trainer = SimpleNamespace(
        should_stop=False,
        is_global_zero=True,
        callback_metrics={},
        lightning_module=torch.nn.Linear(1, 1),
        strategy=SimpleNamespace(reduce_boolean_decision=lambda decision, all: decision),
        save_checkpoint=save,
    )
    monkeypatch.setattr(
        "finetune.runs.model_checkpoint.link", lambda *paths: linked.append([p.stem for p in paths])
    )
    callback._save(trainer, "best", "last")
    assert (written, linked) == (["best"], [["best", "last"]])
    trainer.is_global_zero = False
    callback._save(trainer, "best", "last")
    # what is spread over devices is brought together by all
    assert len(linked) == 1 and len(written) == 2
