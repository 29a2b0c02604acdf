"""Limits that end a run and can be raised, epochs that are resumed in the middle, and weight averages."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from colours import QUICK
from pytorch_lightning.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    Timer,
)
from pytorch_lightning.loops.utilities import _parse_loop_limits

from finetune.runs.lightning_callbacks import Limits, ended_by, enter_epoch, keep_patience


def test_finished_by_epochs_or_by_steps():
    progress = {"total": {}, "current": {"ready": 3, "started": 3, "processed": 3, "completed": 2}}
    checkpoint = {"loops": {"fit_loop": {"epoch_progress": progress}}, "global_step": 30}
    finished = [(3, -1), (2, -1), (4, 30), (4, 29), (None, 30), (3, 1000)]
    for given in (*finished, (4, -1), (None, -1), (-1, -1), (4, 31)):
        max_epochs, max_steps = given
        limits = Limits(max_epochs=max_epochs, max_steps=max_steps)
        assert bool(ended_by(checkpoint, limits)) == (given in finished), given
    assert ended_by(checkpoint, Limits(max_epochs=3)) == "trainer.max_epochs 3"
    assert (
        ended_by(checkpoint, Limits(max_epochs=2))
        == "3 epochs trained, more than trainer.max_epochs 2"
    )
    assert (
        ended_by(checkpoint, Limits(max_steps=9))
        == "30 steps trained, more than trainer.max_steps 9"
    )


def checkpoint_of(*callbacks: Any, **own: Any) -> dict[str, Any]:
    """A `last.ckpt` after 3 epochs and 30 steps that a callback has ended."""
    states = {callback.state_key: callback.state_dict() for callback in callbacks}
    states["Checkpoints"] = {
        "is_stopped": True,
        "limits": Limits(callbacks=callbacks).as_plain(),
        **own,
    }
    progress = {"current": {"processed": 3}}
    return {
        "loops": {"fit_loop": {"epoch_progress": progress}},
        "global_step": 30,
        "callbacks": states,
    }


def test_a_run_that_early_stopping_ended_continues_with_more_patience():
    stopped = EarlyStopping("val/loss", patience=2)
    stopped.wait_count = 2
    checkpoint = checkpoint_of(stopped)
    assert ended_by(checkpoint, Limits(callbacks=[stopped])) == "early stopping, patience 2"
    assert ended_by(checkpoint, Limits(callbacks=[EarlyStopping("val/loss", patience=3)])) == ""
    assert ended_by(checkpoint, Limits()) == ""  # without it, too
    # it was a signal, when the patience was just used up
    checkpoint["callbacks"]["Checkpoints"]["is_stopped"] = False
    assert ended_by(checkpoint, Limits(callbacks=[stopped])) == ""


def test_a_run_that_a_timer_ended_continues_with_more_time():
    timer = Timer({"seconds": 60})
    timer.load_state_dict({"time_elapsed": {"train": 61.0}})
    checkpoint = checkpoint_of(timer)
    assert (
        ended_by(checkpoint, Limits(callbacks=[Timer({"seconds": 60})])) == "trainer.max_time, 60 s"
    )
    assert ended_by(checkpoint, Limits(callbacks=[Timer({"seconds": 62})])) == ""


def test_a_run_that_another_callback_ended_continues_when_a_limit_changes():
    checkpoint = checkpoint_of()
    assert ended_by(checkpoint, Limits()) == "a callback that stopped it"
    assert ended_by(checkpoint, Limits(min_epochs=9)) == ""


def test_averaging_passes_once_more_over_the_images():
    averaging = StochasticWeightAveraging(swa_lrs=0.01)
    checkpoint = checkpoint_of(averaging, is_stopped=False)
    assert ended_by(checkpoint, Limits(max_epochs=3))
    assert ended_by(checkpoint, Limits(max_epochs=3, callbacks=[averaging])) == ""


def test_the_patience_given_now_holds():
    now, before = EarlyStopping("val/loss", patience=9), EarlyStopping("val/loss", patience=2)
    checkpoint = {"callbacks": {before.state_key: before.state_dict(), "Timer": {"patience": 1}}}
    keep_patience(checkpoint, SimpleNamespace(callbacks=[now]))
    assert checkpoint["callbacks"][before.state_key]["patience"] == 9
    assert checkpoint["callbacks"]["Timer"] == {"patience": 1}


def test_the_waits_of_another_run_do_not_count():
    stopping = EarlyStopping("val/loss", patience=2)
    checkpoint = {
        "callbacks": {stopping.state_key: stopping.state_dict(), "Timer": {"patience": 1}}
    }
    keep_patience(checkpoint, SimpleNamespace(callbacks=[stopping]), True)
    assert checkpoint == {"callbacks": {"Timer": {"patience": 1}}}


def test_limits_are_the_same_before_lightning_has_filled_them_in():
    """A run that a callback ended by a rule of its own is finished: its checkpoint has what Lightning put there."""
    for options in ({}, {"min_epochs": 2}, {"min_steps": 5}, {"min_epochs": 2, "min_steps": 5}):
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=3, logger=False, enable_checkpointing=False, **options
        )
        before = Limits.of(trainer).as_plain()
        given = trainer.min_steps, trainer.max_steps, trainer.min_epochs, trainer.max_epochs
        trainer.fit_loop.min_epochs, _ = _parse_loop_limits(*given, trainer)
        assert Limits.of(trainer).as_plain() == before


@pytest.mark.parametrize(("started", "is_inside"), [(1, False), (2, True)])
def test_an_epoch_entered_in_its_middle_has_its_beginning_and_keeps_its_rates(started, is_inside):
    called = []

    class Scheduler(GradientAccumulationScheduler):
        def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
            called.append("scheduler")
            trainer.optimizers[0].param_groups[0]["lr"] = 9.0

    class Other(Timer):
        def on_train_epoch_start(self, *_: Any) -> None:
            called.append("other")

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    progress = SimpleNamespace(current=SimpleNamespace(started=started, processed=1))
    loop = SimpleNamespace(epoch_progress=progress)
    callbacks = [Scheduler({0: 2}), Other()]
    enter_epoch(
        SimpleNamespace(
            fit_loop=loop, callbacks=callbacks, optimizers=[optimizer], lightning_module=None
        )
    )
    assert called == (["scheduler"] if is_inside else []) and optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.slow
def test_averaging_that_would_do_harm_is_refused(cli, colours, tmp_path):
    def fit(name: str, *more: str, **options: Any) -> None:
        callback = {"class_path": f"pytorch_lightning.callbacks.{name}", "init_args": options}
        cli(
            "fit",
            "--data.root",
            colours,
            *QUICK,
            "--trainer.callbacks",
            json.dumps([callback]),
            *more,
        )

    averaged = {"swa_lrs": 0.01, "device": "cpu"}
    with pytest.raises(ValueError, match=r"the frozen ones too: omit it, or .*model\.freeze"):
        fit("StochasticWeightAveraging", "--model.freeze_batch_norm", "true", **averaged)
    with pytest.raises(ValueError, match="the frozen ones too: omit it"):
        # these were once 0 and 1
        fit("StochasticWeightAveraging", "--model.freeze", "features.3", **averaged)
    lenet = ("--model.backbone", "lenet", "--data.image_size", "28")
    with pytest.raises(ValueError, match="needs batch norm, which lenet does not have"):
        fit("StochasticWeightAveraging", *lenet, **averaged)
    with pytest.raises(ValueError, match="other weights than best.ckpt holds with WeightAveraging"):
        fit("EMAWeightAveraging")
    assert list(tmp_path.iterdir()) == []
