"""Checkpoints of short epochs wait in memory; only a kill loses one, and the resumed run repeats what was lost."""

import math
import os
import signal
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
from tiers import sweep
from torch import nn

from finetune.cli import run as run_command
from finetune.distributed.signals import Interrupted
from finetune.runs import deferred_checkpoints, model_checkpoint
from finetune.runs.checkpoint_io import AtomicCheckpointIO
from finetune.runs.deferred_checkpoints import DeferredCheckpoints, seconds_of_each
from finetune.training.classifier import Classifier

STEPS = 4  # of an epoch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def write(clock: list[float], tmp_path: Path) -> Callable[..., None]:
    """Writes a checkpoint of this many bytes in this many seconds."""

    def write(deferred: DeferredCheckpoints, seconds: float, *names: str, size: int = 0) -> None:
        with deferred.timed(tmp_path / "one.ckpt", names or ("last",)):
            with open(tmp_path / "one.ckpt", "wb") as file:
                file.truncate(size)
            clock[0] += seconds

    return write


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
def test_a_checkpoint_waits_until_writing_is_a_fiftieth_of_the_time(
    clock, write, seconds, size, names, expected
):
    deferred = DeferredCheckpoints()
    clock[0] = 0.001  # of a machine that has just begun
    assert not deferred.may_wait()  # what it takes is not known
    write(deferred, seconds, *names, size=size)
    clock[0] += 9.9
    soon = deferred.may_wait()
    clock[0] += 0.2
    assert [soon, deferred.may_wait()] == expected


@pytest.mark.parametrize(("epoch", "num_waiting"), [(1.0, 58), (19.0, 2), (29.0, 1), (31.0, 0)])
def test_no_checkpoint_waits_for_more_than_a_minute(clock, write, epoch, num_waiting):
    deferred = DeferredCheckpoints()
    deferred.may_wait()
    write(deferred, 30)
    waiting = 0
    clock[0] += epoch
    while deferred.may_wait():
        waiting += 1
        clock[0] += epoch
    assert waiting == num_waiting


@pytest.mark.parametrize(
    ("writing", "epoch"), [(0.5, 10.0), (1.1, 10.0), (3.0, 6.25), (0.3, 1.0), (2.0, 59.0)]
)
def test_as_many_checkpoints_wait_as_minutes_reckons_with(clock, write, writing, epoch):
    deferred = DeferredCheckpoints()
    num_written = 0
    for _ in range(100):
        clock[0] += epoch
        if not deferred.may_wait():
            num_written += 1
            write(deferred, writing)
    each = seconds_of_each(writing, 1, 0.0, epoch)
    assert num_written == pytest.approx(100 * each / writing, abs=1.1)  # and the first
    assert seconds_of_each(writing, 1, 0.04, epoch) == pytest.approx(
        each + 0.04 * (1 - each / writing)
    )
    assert seconds_of_each(writing, deferred_checkpoints.MOST + 1, 0.04, epoch) == writing


def test_deferred_checkpoints_are_written_in_the_order_in_which_they_came():
    deferred = DeferredCheckpoints()

    def taken(*held: tuple[tuple[str, ...], int]) -> list[tuple[list[str], int]]:
        for names, epoch in held:
            deferred.hold(names, {"epoch": epoch})
        return [(names, checkpoint["epoch"]) for names, checkpoint in deferred.take()]

    both = ("best", "last")
    assert taken((both, 1)) == [(["best", "last"], 1)]
    assert taken() == []
    assert taken((both, 1), (("last",), 2), (("last",), 3)) == [(["best"], 1), (["last"], 3)]
    assert taken((both, 1), (("last",), 2), (both, 3)) == [(["best", "last"], 3)]
    deferred.hold(both, {"epoch": 4})
    deferred.drop(["last"])
    assert taken() == [(["best"], 4)]
    deferred.hold(both, {"epoch": 5})
    assert [names for names, _ in deferred.take(but=["last"])] == [["best"]]
    with pytest.raises(OSError, match="full"):
        for _ in deferred.take():
            raise OSError("full")
    assert taken() == [(["last"], 5)]  # what could not be written waits on


def test_a_deferred_checkpoint_is_a_copy_that_training_does_not_change():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    network = network.to(memory_format=torch.channels_last)
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
    assert not is_same(dict(checkpoint["state_dict"]), before)  # the control


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_deferred_checkpoint_takes_no_memory_of_a_gpu():
    deferred = DeferredCheckpoints()
    deferred.hold(("last",), {"state_dict": {"weight": torch.ones(3, device="cuda")}})
    ((_, held),) = deferred.take()
    assert held["state_dict"]["weight"].device.type == "cpu"


# Fits whose checkpoints wait


@pytest.fixture
def all_wait(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Let everything wait that may, after the first; which are written at once, and at which step?"""
    monkeypatch.setattr(deferred_checkpoints, "QUICK", 0.0)
    monkeypatch.setattr(deferred_checkpoints, "SHARE", 1e-9)
    written: list[tuple[str, int]] = []
    save_checkpoint = pl.Trainer.save_checkpoint

    def save(trainer: pl.Trainer, path: Path, *arguments: Any) -> None:
        save_checkpoint(trainer, path, *arguments)
        written.append((path.stem, trainer.global_step))

    monkeypatch.setattr(pl.Trainer, "save_checkpoint", save)
    return written


def fitted(
    root: Path, colours: Path, *options: Any, error: type[BaseException] | None = None
) -> dict[str, Any]:
    """Fit four epochs, or go on, and return what the checkpoints and tables in `root` hold."""
    command = ["fit", colours, *QUICKEST, "--epochs", 4, "--test_after_fit", "false"]
    command += ["--out", root, *options]
    with pytest.raises(error) if error else nullcontext():
        run_command([str(argument) for argument in command])
    folder = root / "fit/version_0"
    found = {
        name: torch.load(folder / f"checkpoints/{name}.ckpt", weights_only=True)
        for name in ("best", "last")
    }
    return {**found, "steps": (folder / "steps.csv").read_text()}


@pytest.fixture
def fit(colours: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    return lambda root, *options, **more: fitted(tmp_path / root, colours, *options, **more)


@pytest.fixture(scope="module")
def complete(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An uninterrupted fit without deferred checkpoints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deferred_checkpoints, "QUICK", math.inf)
        return fitted(tmp_path_factory.mktemp("whole") / "whole", colours)


STATE = ["state_dict", "optimizer_states", "loops", "lr_schedulers", "epoch", "global_step"]


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a["steps"] == b["steps"] and all(
        is_same(a[name][part], b[name][part])
        for name in ("best", "last")
        for part in (*STATE, "callbacks")
    )


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Calls a function before the training step of this number, or before another hook after so many steps."""

    originals = {
        name: getattr(Classifier, name) for name in ("training_step", "on_train_epoch_end")
    }

    def patch(step: int, act: Callable[[], None], hook: str = "training_step") -> None:
        def hooked(self: Classifier, *arguments: Any) -> Any:
            if self.trainer.global_step == step:
                act()
            return originals[hook](self, *arguments)

        monkeypatch.setattr(Classifier, hook, hooked)

    return patch


def fail() -> None:
    raise RuntimeError("a broken image")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Chooses the epochs that are the best so far."""

    def choose(*epochs: int) -> None:
        validations = iter(range(9))
        monkeypatch.setattr(
            model_checkpoint,
            "lowest_acceptable",
            lambda *_: 0.0 if next(validations) in epochs else 2.0,
        )

    return choose


def never_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_checkpoints, "copy_of", lambda checkpoint: checkpoint)


@pytest.mark.slow
@promise("resume", controls=[never_copy])
def test_in_the_end_all_is_as_if_no_checkpoint_had_waited(fit, kept, request, monkeypatch):
    monkeypatch.setattr(deferred_checkpoints, "QUICK", math.inf)
    kept(0, 1)
    complete = fit("whole")
    assert complete["best"]["epoch"] == 1 and complete["last"]["epoch"] == 3
    written = request.getfixturevalue("all_wait")
    kept(0, 1)
    assert same(fit("waiting"), complete)
    assert written == [("best", STEPS)]  # by the trainer: the others have waited


def forget_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeferredCheckpoints, "take", lambda *_, **__: iter(()))


@promise("resume", controls=[forget_what_waits])
@pytest.mark.parametrize(
    ("at", "stop", "error", "step"),
    sweep(
        [
            ((2 * STEPS + 1,), interrupt, Interrupted, 2 * STEPS + 2),
            ((2 * STEPS, "on_train_epoch_end"), interrupt, Interrupted, 2 * STEPS),
            ((2 * STEPS + 1,), fail, RuntimeError, 2 * STEPS),
        ],
        quick=[((2 * STEPS + 1,), interrupt, Interrupted, 2 * STEPS + 2)],
    ),
)
def test_a_signal_or_an_error_writes_what_waits_and_resume_ends_as_uninterrupted(
    fit, complete, all_wait, at_step, at, stop, error, step
):
    at_step(at[0], stop, *at[1:])
    found = fit("stopped", error=error)
    assert found["last"]["global_step"] == step
    at_step(-1, fail)
    assert same(fit("stopped", "--resume"), complete)


@pytest.mark.slow
def test_a_best_that_waits_is_written_before_a_last_that_no_longer_leads_to_it(
    fit, all_wait, at_step, kept
):
    kept(0, 1)
    at_step(2 * STEPS, interrupt)
    stopped = fit("stopped", error=Interrupted)
    assert (stopped["best"]["epoch"], stopped["last"]["global_step"]) == (1, 2 * STEPS + 1)
    at_step(-1, fail)
    kept()
    found = fit("stopped", "--resume")
    assert (found["best"]["epoch"], found["last"]["epoch"]) == (1, 3)


@pytest.mark.slow
def test_a_checkpoint_for_which_there_is_no_memory_is_written(fit, complete, all_wait, monkeypatch):
    def copy_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
        raise MemoryError

    monkeypatch.setattr(deferred_checkpoints, "copy_of", copy_of)
    assert same(fit("written"), complete)


@pytest.mark.slow
def test_checkpoint_every_n_steps_and_val_fraction_0_with_checkpoints_that_wait(
    fit, all_wait, tmp_path
):
    fit("due", "--checkpoint_every_n_steps", STEPS)
    assert [step for _, step in all_wait] == [STEPS, 2 * STEPS, 3 * STEPS, 4 * STEPS]
    all_wait.clear()
    found = fit("waiting", "--data.val_fraction", 0)
    assert len(all_wait) == 1 and found["best"]["epoch"] == 3
    folder = tmp_path / "waiting/fit/version_0/checkpoints"
    assert (folder / "best.ckpt").samefile(folder / "last.ckpt")


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "error"), [(fail, RuntimeError), (interrupt, OSError)])
def test_on_a_disk_that_is_full_in_the_end_the_loss_is_reported(
    fit, all_wait, at_step, monkeypatch, caplog, stop, error
):
    """A stop that saved nothing must say so; of an error that came before it stays the news."""

    def full(self: Any, checkpoint: dict[str, Any], path: Path, *arguments: Any) -> None:
        raise OSError(f"the checkpoint {path} could not be written: full")

    def fill_and_stop() -> None:
        monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", full)
        stop()

    at_step(2 * STEPS, fill_and_stop)
    assert fit("full", error=error)["last"]["global_step"] == STEPS
    assert "since the last checkpoint is lost" in caplog.text
