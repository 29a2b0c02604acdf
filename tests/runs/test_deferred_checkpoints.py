"""A deferred checkpoint is lost only by a kill, and the resumed run repeats what the kill lost."""

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from colours import QUICKEST
from promise import promise
from scenario_results import is_same
from torch import nn

from finetune.cli import run as run_command
from finetune.distributed.signals import Interrupted, SignalFlag
from finetune.runs import deferred_checkpoints
from finetune.runs.deferred_checkpoints import DeferredCheckpoints, seconds_of_each
from finetune.runs.model_checkpoint import Checkpoints
from finetune.training.classifier import Classifier

STEPS = 4  # of an epoch


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def write(
    deferred: DeferredCheckpoints,
    clock: list[float],
    folder: Path,
    seconds: float,
    names=("last",),
    size: int = 0,
) -> None:
    """Write a checkpoint of this many bytes in this many seconds."""
    with deferred.timed(folder / "one.ckpt", names):
        with open(folder / "one.ckpt", "wb") as file:
            file.truncate(size)
        clock[0] += seconds


@pytest.mark.parametrize(
    ("seconds", "size", "names", "expected"),
    [
        (0.04, 9, ("last",), [False, False]),  # not worth it
        (0.2, 9, ("last",), [True, False]),
        (0.2, 9, ("best", "last"), [True, False]),
        (0.2, 9, ("best",), [False, False]),  # inside an epoch
        (0.2, deferred_checkpoints.MOST + 1, ("last",), [False, False]),
    ],
)
def test_the_next_waits_until_writing_is_a_fiftieth_of_the_time(
    clock, tmp_path, seconds, size, names, expected
):
    deferred = DeferredCheckpoints()
    clock[0] = 0.001  # of a machine that has just begun
    assert not deferred.may_wait()  # what it takes is not known
    write(deferred, clock, tmp_path, seconds, names, size)
    clock[0] += 9.9
    soon = deferred.may_wait()
    clock[0] += 0.2
    assert [soon, deferred.may_wait()] == expected


def test_what_waits_is_taken_in_the_order_in_which_it_came():
    deferred = DeferredCheckpoints()

    def taken(*held: tuple[tuple[str, ...], int]) -> list[tuple[list[str], int]]:
        for names, epoch in held:
            deferred.hold(names, {"epoch": epoch})
        return [(names, checkpoint["epoch"]) for names, checkpoint in deferred.take()]

    assert taken((("best", "last"), 1)) == [(["best", "last"], 1)]
    assert taken() == []
    assert taken((("best", "last"), 1), (("last",), 2), (("last",), 3)) == [
        (["best"], 1),
        (["last"], 3),
    ]
    assert taken((("best", "last"), 1), (("last",), 2), (("best", "last"), 3)) == [
        (["best", "last"], 3)
    ]
    # without a validation
    assert taken((("last", "best"), 1), (("last", "best"), 2)) == [(["last", "best"], 2)]
    deferred.hold(("best", "last"), {"epoch": 4})
    deferred.drop(["last"])
    assert taken() == [(["best"], 4)]
    deferred.hold(("best", "last"), {"epoch": 5})
    assert [names for names, _ in deferred.take(but=["last"])] == [["best"]]
    assert [names for names, _ in deferred.take()] == [["last"]]


def test_what_waits_is_not_lost_where_there_is_no_memory_for_the_next(monkeypatch):
    deferred = DeferredCheckpoints()
    assert deferred.hold(("last",), {"epoch": 1})

    def copy_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
        raise MemoryError

    monkeypatch.setattr(deferred_checkpoints, "copy_of", copy_of)
    assert not deferred.hold(("last",), {"epoch": 2})
    assert [checkpoint["epoch"] for _, checkpoint in deferred.take()] == [1]


def test_what_could_not_be_written_waits_on():
    deferred = DeferredCheckpoints()
    deferred.hold(("last",), {"epoch": 1})
    with pytest.raises(OSError, match="full"):
        for _ in deferred.take():
            raise OSError("full")
    assert [names for names, _ in deferred.take()] == [["last"]]


def test_a_copy_waits_that_training_does_not_change():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(
        memory_format=torch.channels_last
    )
    checkpoint = {"state_dict": network.state_dict(), "loops": {"fit_loop": [1]}, "epoch": 1}
    before = {name: value.clone() for name, value in network.state_dict().items()}
    deferred = DeferredCheckpoints()
    deferred.hold(("last",), checkpoint)
    with torch.no_grad():
        network[0].weight += 1
    checkpoint["loops"]["fit_loop"].append(2)
    ((_, held),) = deferred.take()
    assert is_same(dict(held["state_dict"]), before) and held["loops"] == {"fit_loop": [1]}
    assert held["state_dict"]["0.weight"].is_contiguous(memory_format=torch.channels_last)
    assert held["state_dict"]._metadata == network.state_dict()._metadata
    assert not is_same(dict(checkpoint["state_dict"]), before)  # the control


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_waits_takes_no_memory_of_a_gpu():
    deferred = DeferredCheckpoints()
    deferred.hold(("last",), {"state_dict": {"weight": torch.ones(3, device="cuda")}})
    ((_, held),) = deferred.take()
    assert held["state_dict"]["weight"].device.type == "cpu"


@pytest.mark.parametrize(
    ("writing", "each"),
    [(0.05, 0.05), (0.06, 0.06), (0.2, 0.2), (0.5, 0.5 / 3), (1.1, 0.22), (6.0, 1.2), (99.0, 19.8)],
)
def test_how_much_of_an_epoch_checkpoints_take(writing, each):
    assert seconds_of_each(writing, 1, 0.0, 10.0) == pytest.approx(each)
    assert seconds_of_each(writing, 1, 0.04, 10.0) == pytest.approx(
        each + 0.04 * (1 - each / writing)
    )
    assert seconds_of_each(writing, deferred_checkpoints.MOST + 1, 0.04, 10.0) == writing
    assert seconds_of_each(writing, 1, 0.04, 70.0) == writing


@pytest.mark.parametrize(
    ("writing", "epoch"), [(0.5, 10.0), (1.1, 10.0), (3.0, 6.25), (0.3, 1.0), (2.0, 59.0)]
)
def test_as_many_wait_as_was_reckoned(clock, tmp_path, writing, epoch):
    deferred, written = DeferredCheckpoints(), 0
    for _ in range(100):
        clock[0] += epoch
        if not deferred.may_wait():
            written += 1
            write(deferred, clock, tmp_path, writing)
    # and the first
    assert written == pytest.approx(
        100 * seconds_of_each(writing, 1, 0.0, epoch) / writing, abs=1.1
    )


@pytest.mark.parametrize(
    ("epoch", "num_waiting"), [(1.0, 58), (19.0, 2), (29.0, 1), (31.0, 0), (61.0, 0)]
)
def test_nothing_waits_for_more_than_a_minute(clock, tmp_path, epoch, num_waiting):
    deferred = DeferredCheckpoints()
    assert not deferred.may_wait()
    write(deferred, clock, tmp_path, 30)
    waiting = 0
    clock[0] += epoch
    while deferred.may_wait():
        waiting += 1
        clock[0] += epoch
    assert waiting == num_waiting


def test_all_that_was_written_for_a_last_counts(clock, tmp_path):
    """A best from before it, where there is one, as well."""
    deferred = DeferredCheckpoints()
    assert not deferred.may_wait()
    for name in ("best", "last"):
        write(deferred, clock, tmp_path, 0.2, (name,))
    clock[0] += 19.0
    assert deferred.may_wait()
    clock[0] += 1.1
    assert not deferred.may_wait()


@pytest.fixture
def all_wait(monkeypatch) -> list[tuple[str, int]]:
    """Let everything wait that may, after the first; which are written at once, and at which step?"""
    monkeypatch.setattr(deferred_checkpoints, "QUICK", 0.0)
    monkeypatch.setattr(deferred_checkpoints, "SHARE", 1e-9)
    written: list[tuple[str, int]] = []

    def save(
        trainer: pl.Trainer, path: Path, *arguments: Any, original: Any = pl.Trainer.save_checkpoint
    ) -> None:
        original(trainer, path, *arguments)
        written.append((path.stem, trainer.global_step))

    monkeypatch.setattr(pl.Trainer, "save_checkpoint", save)
    return written


def fitted(
    root: Path, colours: Path, *options: Any, error: type[BaseException] | None = None
) -> dict[str, Any]:
    """Fit four epochs, or go on, and return what the checkpoints and tables in `root` hold."""
    command = [
        "fit",
        "--data.root",
        colours,
        *QUICKEST,
        "--trainer.max_epochs",
        4,
        "--test_after_fit",
        "false",
    ]
    command += ["--out", root, *options]
    with pytest.raises(error) if error else nullcontext():
        run_command([str(argument) for argument in command])
    folder = root / "fit/version_0"
    found = {
        name: torch.load(folder / f"checkpoints/{name}.ckpt", weights_only=True)
        for name in ("best", "last")
    }
    for checkpoint in found.values():  # which say when they were written, or where
        checkpoint["finetune"].pop("began_from")
    return {**found, "steps": (folder / "steps.csv").read_text()}


@pytest.fixture
def fit(colours, tmp_path) -> Callable[..., dict[str, Any]]:
    return lambda root, *options, **more: fitted(tmp_path / root, colours, *options, **more)


@pytest.fixture(scope="module")
def complete(colours, tmp_path_factory) -> dict[str, Any]:
    """An uninterrupted fit without deferred checkpoints."""
    return fitted(tmp_path_factory.mktemp("whole") / "whole", colours)


def state(checkpoint: dict[str, Any]) -> list[Any]:
    names = (
        "state_dict",
        "optimizer_states",
        "loops",
        "lr_schedulers",
        "epoch",
        "global_step",
        "callbacks",
    )
    return [checkpoint[name] for name in names]


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return (
        all(is_same(state(a[name]), state(b[name])) for name in ("best", "last"))
        and a["steps"] == b["steps"]
    )


@promise("resume")
@pytest.mark.slow
@pytest.mark.parametrize("kept", [[0, 1], [0, 3]])
def test_in_the_end_all_is_as_if_nothing_had_waited(fit, request, monkeypatch, kept):
    lowest = "finetune.runs.model_checkpoint.lowest_acceptable"
    monkeypatch.setattr(lowest, lambda *_: 0.0 if validations.pop(0) in kept else 2.0)
    validations = [*range(4)]
    complete = fit("whole")
    assert complete["best"]["epoch"] == kept[-1] and complete["last"]["epoch"] == 3
    written = request.getfixturevalue("all_wait")
    validations = [*range(4)]
    assert same(fit("waiting"), complete)
    assert written == [("best", STEPS)]  # by the trainer: the others have waited


@pytest.mark.slow
def test_without_a_validation_the_best_is_the_last(fit, all_wait, tmp_path):
    found = fit("waiting", "--data.val_fraction", 0)
    assert len(all_wait) == 1 and found["best"]["epoch"] == 3
    best, last = (
        tmp_path / f"waiting/fit/version_0/checkpoints/{name}.ckpt" for name in ("best", "last")
    )
    assert best.samefile(last)


@pytest.mark.slow
def test_what_there_is_no_memory_for_is_written(fit, complete, all_wait, monkeypatch):
    copies = [deferred_checkpoints.copy_of, None]  # of the second epoch, and the third

    def copy_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
        if (copied := copies.pop(0)) is None:
            raise MemoryError
        return copied(checkpoint)

    with monkeypatch.context() as patched:
        patched.setattr(deferred_checkpoints, "copy_of", copy_of)
        patched.setattr(
            Classifier, "training_step", broken_at(3 * STEPS + 1, RuntimeError("killed"))
        )
        patched.setattr(Checkpoints, "on_exception", lambda *_: None)
        assert (
            fit("killed", error=RuntimeError)["last"]["global_step"] == 3 * STEPS and copies == []
        )
    assert same(fit("killed", "--resume"), complete)


@pytest.mark.slow
def test_a_best_inside_an_epoch_is_led_to_by_the_last_on_the_disk(fit, all_wait, monkeypatch):
    monkeypatch.setattr("finetune.runs.model_checkpoint.lowest_acceptable", lambda *_: 0.0)
    monkeypatch.setattr(
        Classifier, "training_step", broken_at(3 * STEPS - 1, RuntimeError("killed"))
    )
    monkeypatch.setattr(Checkpoints, "on_exception", lambda *_: None)
    found = fit("killed", "--trainer.val_check_interval", 0.5, error=RuntimeError)
    assert [found[name]["global_step"] for name in ("best", "last")] == [
        2 * STEPS + STEPS // 2,
        2 * STEPS,
    ]


@pytest.mark.slow
def test_what_is_due_does_not_wait(fit, all_wait):
    fit("waiting", "--checkpoint_every_n_steps", STEPS)
    assert [step for _, step in all_wait] == [STEPS, 2 * STEPS, 3 * STEPS, 4 * STEPS]


def broken_at(step: int, error: BaseException) -> Any:
    original = Classifier.training_step

    def training_step(self: Classifier, *arguments: Any) -> Any:
        if self.trainer.global_step == step:
            raise error
        return original(self, *arguments)

    return training_step


@pytest.mark.slow
def test_an_error_leaves_the_epoch_before_it(fit, complete, all_wait, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(
            Classifier, "training_step", broken_at(2 * STEPS + 1, RuntimeError("a broken image"))
        )
        found = fit("broken", error=RuntimeError)
    assert found["last"]["global_step"] == 2 * STEPS and len(all_wait) == 1
    assert same(fit("broken", "--resume"), complete)


def stopped_at(step: int, hook: str) -> Any:
    def agreed(self: SignalFlag, trainer: pl.Trainer) -> int:
        return 15 if (trainer.global_step, sys._getframe(1).f_code.co_name) == (step, hook) else 0

    return agreed


@pytest.mark.parametrize(
    ("step", "hook"),
    [
        pytest.param(2 * STEPS, "on_train_epoch_start", marks=pytest.mark.slow),
        pytest.param(2 * STEPS, "on_validation_batch_end", marks=pytest.mark.slow),
        (2 * STEPS + 1, "on_train_batch_end"),
    ],
)
def test_a_signal_leaves_the_step_at_which_it_was_noticed(
    fit, complete, all_wait, monkeypatch, step, hook
):
    with monkeypatch.context() as patched:
        patched.setattr(SignalFlag, "agreed", stopped_at(step, hook))
        assert fit("stopped", error=Interrupted)["last"]["global_step"] == step
    assert same(fit("stopped", "--resume"), complete)


@pytest.mark.slow
def test_a_best_that_waits_is_written_before_a_last_that_no_longer_leads_to_it(
    fit, all_wait, monkeypatch
):
    validations = [*range(4)]
    monkeypatch.setattr(
        "finetune.runs.model_checkpoint.lowest_acceptable",
        lambda *_: 0.0 if validations.pop(0) < 2 else 2.0,
    )
    with monkeypatch.context() as patched:
        patched.setattr(SignalFlag, "agreed", stopped_at(2 * STEPS + 1, "on_train_batch_end"))
        stopped = fit("stopped", error=Interrupted)
    assert (stopped["best"]["epoch"], stopped["last"]["global_step"]) == (1, 2 * STEPS + 1)
    found = fit("stopped", "--resume")
    assert (found["best"]["epoch"], found["last"]["epoch"]) == (1, 3) and not validations


@pytest.mark.slow
def test_a_kill_takes_what_has_waited_and_the_run_that_continues_does_it_again(
    fit, complete, all_wait, monkeypatch
):
    with monkeypatch.context() as patched:  # as a kill does, nothing is written at the end
        patched.setattr(
            Classifier, "training_step", broken_at(2 * STEPS + 1, RuntimeError("killed"))
        )
        patched.setattr(Checkpoints, "_write_deferred", lambda *_, **__: None)
        assert fit("killed", error=RuntimeError)["last"]["global_step"] == STEPS
    assert same(fit("killed", "--resume"), complete)


@pytest.mark.slow
@pytest.mark.parametrize(("is_stopped", "error"), [(False, RuntimeError), (True, OSError)])
def test_a_disk_that_is_full_in_the_end(fit, all_wait, monkeypatch, caplog, is_stopped, error):
    """A stop that saved nothing must say so; of an error that came before it stays the news."""

    def full(self: Any, checkpoint: dict[str, Any], path: Path, *arguments: Any) -> None:
        raise OSError(f"the checkpoint {path} could not be written: full")

    def training_step(
        self: Classifier, *arguments: Any, original: Any = Classifier.training_step
    ) -> Any:
        if self.trainer.global_step == 2 * STEPS - 1:
            monkeypatch.setattr(
                "finetune.runs.checkpoint_io.AtomicCheckpointIO.save_checkpoint", full
            )
        elif self.trainer.global_step == 2 * STEPS:
            raise RuntimeError("a broken image")
        return original(self, *arguments)

    monkeypatch.setattr(Classifier, "training_step", training_step)
    if is_stopped:
        monkeypatch.setattr(SignalFlag, "agreed", stopped_at(2 * STEPS, "on_train_epoch_start"))
    assert fit("full", error=error)["last"]["global_step"] == STEPS
    assert "what was trained since the last checkpoint is lost: the checkpoint" in caplog.text
