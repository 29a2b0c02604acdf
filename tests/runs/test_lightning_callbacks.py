"""Limits that end a run and can be raised."""

from types import SimpleNamespace
from typing import Any

from pytorch_lightning.callbacks import EarlyStopping

from finetune.runs.lightning_callbacks import Limits, ended_by, keep_patience


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


def test_a_run_that_another_callback_ended_is_finished():
    checkpoint = checkpoint_of()
    assert ended_by(checkpoint, Limits()) == "a callback that stopped it"


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
