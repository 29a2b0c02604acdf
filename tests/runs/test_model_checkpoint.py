"""When the best is written, and how often the last."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from colours import QUICK

from finetune.runs.folder import Run
from finetune.runs.metrics_csv import read_metrics
from finetune.runs.model_checkpoint import Checkpoints


def validated(callback: Checkpoints, *accuracies: float) -> list[bool]:
    """For each accuracy of 30 pictures: whether it was saved as the best so far."""
    saved = []
    for accuracy in accuracies:
        paths: list[Path] = []
        trainer = SimpleNamespace(
            state=SimpleNamespace(fn="fit"),
            sanity_checking=False,
            callback_metrics={"val/accuracy": torch.tensor(accuracy), "val/loss": torch.tensor(1.0)},
            datamodule=SimpleNamespace(splits={"val": SimpleNamespace(labels=range(30))}),
            save_checkpoint=paths.append,
            fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(is_last_batch=True))),
        )
        callback.on_validation_end(trainer, None)
        assert [path.name for path in paths] in ([], ["best.ckpt"])
        saved.append(bool(paths))
    return saved


@pytest.fixture
def callback(tmp_path) -> Checkpoints:
    run = Run(tmp_path, "fit")
    run.choose()
    return Checkpoints(run)


def test_best_is_the_last_that_can_not_be_told_from_the_highest(callback):
    # Of 30 pictures the standard error of 0.6 is 0.089, that of 0.5 is 0.091.
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


def test_a_run_of_an_earlier_version_goes_on_from_its_highest(callback):
    callback.load_state_dict({"best_score": [0.8, -0.3]})
    assert validated(callback, 0.7, 0.75) == [False, True]


@pytest.mark.parametrize("state", [{"highest": None}, {"best_score": None}])
def test_nothing_is_best_before_a_validation(callback, state):
    assert callback.state_dict()["highest"] is None
    callback.load_state_dict(state)
    assert callback.highest is None


@pytest.mark.parametrize("num", [0, -1])
def test_every_no_steps_makes_no_sense(tmp_path, num):
    with pytest.raises(ValueError, match=f"--checkpoint_every_n_steps must be at least 1, got {num}"):
        Checkpoints(Run(tmp_path, "fit"), num)


def rows_of(path: Path) -> list[dict[str, str]]:
    """What each row holds: columns are added to those before."""
    return [{name: value for name, value in row.items() if value} for row in read_metrics(path)]


def test_what_a_checkpoint_has_done_is_in_steps_csv_before_it(colours, cli, tmp_path, monkeypatch):
    """A kill right behind the checkpoint would lose the row, which the resumed run does not write again."""
    fit = ["fit", "--data.root", colours, *QUICK, "--trainer.max_epochs", 2, "--trainer.log_every_n_steps", 1]
    fit += ["--test_after_fit", "false"]
    cli(*fit)
    seen = []

    def save(trainer, path, *arguments, original=pl.Trainer.save_checkpoint):
        original(trainer, path, *arguments)
        if path.name == "last.ckpt":
            seen.append((trainer.global_step, rows_of(path.parents[1] / "steps.csv")))

    monkeypatch.setattr(pl.Trainer, "save_checkpoint", save)
    cli(*fit, "--checkpoint_every_n_steps", 1)
    runs = [rows_of(tmp_path / f"runs/fit/version_{i}/steps.csv") for i in range(2)]
    assert runs[0] == runs[1]  # and none is there twice
    assert [step for step, _ in seen] == list(range(1, 9))
    for step, written in seen:
        assert written == [row for row in runs[1] if int(row["step"]) < step]
