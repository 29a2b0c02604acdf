"""Checkpoints are written while training continues; only a kill loses one, and the resumed run repeats its epoch."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from colours import QUICKEST
from promise import promise
from scenario_results import is_same
from slow_disk import slow_down
from tiers import sweep
from torch import nn

from finetune.cli import run as run_command
from finetune.distributed.signals import Interrupted
from finetune.runs import background_writer, model_checkpoint
from finetune.runs.background_writer import BackgroundWriter, copy_of
from finetune.runs.checkpoint_io import AtomicCheckpointIO
from finetune.training.classifier import Classifier

STEPS = 4  # of an epoch
Written = list[dict[str, int]]  # the epochs by name, of each call


class Disk:
    """Writes checkpoints once it may, and fails while it is full."""

    def __init__(self) -> None:
        self.written: Written = []
        self.may_write = threading.Event()
        self.is_full = False
        self.has_begun = threading.Event()

    def __call__(self, checkpoints: background_writer.ByName) -> None:
        self.has_begun.set()
        assert self.may_write.wait(60)
        if self.is_full:
            raise OSError("full")
        self.written.append({name: one.content["epoch"] for name, one in checkpoints.items()})


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.may_write.set()


def test_only_the_newest_checkpoint_of_each_name_is_written(disk):
    writer = BackgroundWriter(disk)
    writer.put(["best", "last"], {"epoch": 1})
    assert disk.has_begun.wait(60)
    for names, epoch in ((["best", "last"], 2), (["last"], 3), (["last"], 4)):
        writer.put(names, {"epoch": epoch})
    assert disk.written == []
    disk.may_write.set()
    writer.finish()
    assert disk.written == [{"best": 1, "last": 1}, {"best": 2, "last": 4}]


def test_a_checkpoint_that_could_not_be_written_is_tried_again_beside_newer_ones(disk):
    disk.may_write.set()
    disk.is_full = True
    writer = BackgroundWriter(disk)
    writer.put(["best", "last"], {"epoch": 1})
    with pytest.raises(OSError, match="full"):
        writer.finish()
    with pytest.raises(OSError, match="full"):
        writer.put(["last"], {"epoch": 2})
    disk.is_full = False
    writer.finish()
    assert disk.written == [{"best": 1, "last": 2}]


def test_training_waits_for_a_large_checkpoint_which_is_not_copied(disk, monkeypatch):
    monkeypatch.setattr(background_writer, "MOST", 7)
    monkeypatch.setattr(background_writer, "copy_of", lambda _: pytest.fail("it was copied"))
    disk.may_write.set()
    BackgroundWriter(disk).put(["last"], {"epoch": 1, "weights": [torch.ones(2)]})
    assert disk.written == [{"last": 1}]


def test_a_waiting_checkpoint_is_a_copy_that_training_does_not_change():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    network = network.to(memory_format=torch.channels_last)
    checkpoint = {"state_dict": network.state_dict(), "loops": {"fit_loop": [1]}, "epoch": 1}
    before = {name: value.clone() for name, value in network.state_dict().items()}
    held = copy_of(checkpoint)
    with torch.no_grad():
        network[0].weight += 1
    checkpoint["loops"]["fit_loop"].append(2)
    assert is_same(dict(held["state_dict"]), before) and held["loops"] == {"fit_loop": [1]}
    assert held["state_dict"]["0.weight"].is_contiguous(memory_format=torch.channels_last)
    assert not is_same(dict(checkpoint["state_dict"]), before)  # the control


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_waiting_checkpoint_takes_no_memory_of_a_gpu():
    held = copy_of({"state_dict": {"weight": torch.ones(3, device="cuda")}})
    assert held["state_dict"]["weight"].device.type == "cpu"


# Fits on a slow disk


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return slow_down(monkeypatch)


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
    """An uninterrupted fit."""
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
    monkeypatch.setattr(background_writer, "copy_of", lambda checkpoint: checkpoint)


@pytest.mark.slow
@promise("resume", controls=[never_copy])
def test_in_the_end_all_is_as_on_a_fast_disk(fit, kept, request):
    kept(0, 1)
    complete = fit("whole")
    assert complete["best"]["epoch"] == 1 and complete["last"]["epoch"] == 3
    written = request.getfixturevalue("slow_disk")
    kept(0, 1)
    assert same(fit("waiting"), complete)
    best = f"best {2 * STEPS}"
    assert written == [f"best {STEPS}", best, f"last {4 * STEPS}", best]  # with familiarity


def never_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackgroundWriter, "finish", lambda self: None)


@promise("resume", controls=[never_wait])
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
    fit, complete, slow_disk, at_step, at, stop, error, step
):
    at_step(at[0], stop, *at[1:])
    found = fit("stopped", error=error)
    assert found["last"]["global_step"] == step
    at_step(-1, fail)
    assert same(fit("stopped", "--resume"), complete)


def test_a_best_that_waits_is_written_although_its_epoch_is_not_repeated(
    fit, slow_disk, at_step, kept
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
def test_training_waits_for_a_checkpoint_every_n_steps(fit, slow_disk):
    fit("due", "--checkpoint_every_n_steps", STEPS // 2, "--epochs", 2)
    assert {name.split()[1] for name in slow_disk} == {"2", "4", "6", "8"}


@pytest.mark.slow
def test_without_validation_images_the_last_checkpoint_is_the_best(fit, slow_disk, tmp_path):
    found = fit("waiting", "--data.val_fraction", 0)
    assert found["best"]["epoch"] == 3
    folder = tmp_path / "waiting/fit/version_0/checkpoints"
    assert (folder / "best.ckpt").samefile(folder / "last.ckpt")


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "error"), [(fail, RuntimeError), (interrupt, OSError)])
def test_on_a_disk_that_is_full_in_the_end_the_loss_is_reported(
    fit, at_step, monkeypatch, caplog, stop, error
):
    """A stop that saved nothing must say so; of an error that came before it stays the news."""

    def full(self: Any, checkpoint: dict[str, Any], path: Path, *arguments: Any) -> None:
        raise OSError(f"the checkpoint {path} could not be written: full")

    fit("full", "--epochs", 1)
    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", full)
    at_step(2 * STEPS, stop)
    assert fit("full", "--resume", error=error)["last"]["global_step"] == STEPS
    assert "since the last checkpoint is lost" in caplog.text
