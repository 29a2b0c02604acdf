"""The clock of a benchmark: which steps it counts, and which it skips."""

from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import ModelCheckpoint

from finetune.profiling import recorder
from finetune.profiling.recorder import DataWaitProfiler, MeasurementDone, Recorder
from finetune.training.progress_bar import ImageProgressBar

STEP = 0.02  # seconds


@pytest.fixture
def fit(monkeypatch, clock):
    """A recorder in a fit, and what makes it take a step."""
    monkeypatch.setattr(recorder, "_SECONDS", 3 * STEP)
    made = Recorder(repeats=2)
    made._batch_size = 4
    trainer = SimpleNamespace(world_size=2, strategy=SimpleNamespace(broadcast=lambda value: value))
    module = SimpleNamespace(device=torch.device("cpu"))

    def step(seconds: float = STEP, waited: float = 0.0, num: int = 4) -> None:
        made.waiting.start("[_TrainingEpochLoop].train_dataloader_next")
        clock(waited)
        made.waiting.stop("[_TrainingEpochLoop].train_dataloader_next")
        clock(seconds - waited)
        made.on_train_batch_end(trainer, module, None, {"label": torch.zeros(num)}, 0)

    return SimpleNamespace(recorder=made, step=step, trainer=trainer, module=module)


def warm_up(fit, seconds: float) -> None:
    """The slow steps before a measurement. The last one is fast, and decides how many steps are measured."""
    for _ in range(fit.recorder._warm_up - 1):
        fit.step(seconds)
    fit.step()


@pytest.mark.slow
def test_the_device_is_waited_for_only_around_a_measurement(fit, monkeypatch):
    waits = []
    monkeypatch.setattr(
        recorder,
        "synchronize",
        lambda device: waits.append(fit.recorder._step - fit.recorder._warm_up),
    )
    with pytest.raises(MeasurementDone):
        for _ in range(2):
            warm_up(fit, seconds=1.0)
            for _ in range(3):
                fit.step()
    assert waits == [-1, 0, 3] * 2


@pytest.mark.slow
def test_a_measurement_is_of_the_steps_after_the_warm_up(fit):
    with pytest.raises(MeasurementDone):
        for _ in range(2):
            warm_up(fit, seconds=1.0)
            for _ in range(3):
                fit.step(waited=STEP / 4)
    # with those of the warm-up it would be 0.4
    assert fit.recorder.whole == pytest.approx([STEP, STEP])
    assert fit.recorder.waited == pytest.approx([0.25, 0.25])


@pytest.mark.slow
def test_an_epochs_turn_is_not_in_it(fit, clock):
    warm_up(fit, seconds=STEP)
    fit.step()
    fit.recorder.on_train_epoch_end(fit.trainer, fit.module)
    clock(7.0)
    fit.recorder.on_train_epoch_start()
    fit.step()
    fit.step()
    assert fit.recorder.whole == pytest.approx([STEP])


@pytest.mark.slow
def test_what_else_takes_time_is_in_it(fit, clock):
    warm_up(fit, seconds=STEP)
    fit.step()
    clock(1.0)  # the control: a callback, or a logger
    fit.step()
    fit.step()
    assert fit.recorder.whole == pytest.approx([STEP + 1.0 / 3])


@pytest.mark.slow
def test_only_waiting_for_training_images_counts(clock):
    waiting = DataWaitProfiler()
    for action, seconds in (
        ("[_TrainingEpochLoop].train_dataloader_next", 2.0),
        ("run_training_batch", 40.0),
    ):
        waiting.start(action)
        clock(seconds)
        waiting.stop(action)
    assert waiting.seconds == 2.0


def test_it_takes_the_place_of_what_writes_checkpoints_and_lines():
    other = Callback()
    trainer = SimpleNamespace(
        callbacks=[ModelCheckpoint(), other, ImageProgressBar()], profiler=None
    )
    made = Recorder(1)
    made.attach(trainer)
    assert trainer.callbacks == [other, made]
    assert trainer.profiler is made.waiting
