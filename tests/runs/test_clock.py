"""The seconds of each phase of a run, with a clock that the test sets."""

import json
from types import SimpleNamespace

import pytest

from finetune.runs import clock
from finetune.runs.clock import Clock
from finetune.runs.folder import Run


@pytest.fixture
def now(monkeypatch):
    time = SimpleNamespace(now=100.0)
    monkeypatch.setattr(clock.time, "monotonic", lambda: time.now)
    return time


def fit(
    run: Run, time: SimpleNamespace, seconds: tuple[float, ...], is_global_zero: bool = True
) -> None:
    """Go through a fit of one epoch and its test; the phases take this many seconds."""
    counted = Clock(run)
    trainer = SimpleNamespace(state=SimpleNamespace(fn="fit"), is_global_zero=is_global_zero)
    hooks = (
        "train_start validation_start validation_end train_epoch_end train_end test_start test_end"
    )
    for hook, passed in zip(hooks.split(), seconds, strict=True):
        time.now += passed
        trainer.state.fn = "test" if hook.startswith("test") else "fit"
        getattr(counted, f"on_{hook}")(trainer)


def test_each_second_has_one_phase(tmp_path, now):
    run = Run(tmp_path, "fit", tmp_path)
    fit(run, now, (3, 10, 2, 0.5, 0.25, 7, 4))
    reported = json.loads((tmp_path / "seconds.json").read_text())
    # What passes between training and its test is nobody's.
    assert reported == {"preparing": 3, "training": 10.75, "validating": 2, "testing": 4}
    fit(run, now, (1, 1, 1, 1, 0, 0, 1))  # resumed: it adds up
    reported = json.loads((tmp_path / "seconds.json").read_text())
    assert reported == {"preparing": 4, "training": 12.75, "validating": 3, "testing": 5}


def test_a_test_by_other_processes_than_the_fit_keeps_its_seconds(tmp_path, now):
    """A resumed run may only have its test left."""
    run = Run(tmp_path, "fit", tmp_path)
    fit(run, now, (3, 10, 2, 0.5, 0.25, 0, 0))
    parents = Clock(run)
    now.now += 50
    parents.on_test_start(SimpleNamespace(is_global_zero=True))
    now.now += 4
    parents.on_test_end(SimpleNamespace(is_global_zero=True))
    reported = json.loads((tmp_path / "seconds.json").read_text())
    assert reported == {"preparing": 3, "training": 10.75, "validating": 2, "testing": 4}


def test_one_device_writes(tmp_path, now):
    fit(Run(tmp_path, "fit", tmp_path), now, (1,) * 7, is_global_zero=False)
    assert not list(tmp_path.iterdir())


def test_a_validation_of_its_own_is_no_phase_of_a_fit(tmp_path, now):
    counted = Clock(Run(tmp_path, "fit", tmp_path))
    trainer = SimpleNamespace(state=SimpleNamespace(fn="validate"), is_global_zero=True)
    counted.on_validation_start(trainer)
    now.now += 5
    counted.on_validation_end(trainer)
    assert counted.seconds["validating"] == 0
