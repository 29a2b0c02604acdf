"""--minutes: the beginning of a fit measures what each part takes, and leaves no trace."""

import multiprocessing
import time
from dataclasses import replace

import numpy as np
import pytest
from data_files import read

from finetune import Classifier, ImageFolderData
from finetune.fitting.time_budget import Costs, measure
from finetune.settings.schema import TrainerSettings

CPU = TrainerSettings(accelerator="cpu", devices=1, precision="32-true")
SLOW = 0.05  # seconds


@pytest.fixture
def advance(monkeypatch):
    """Move `time.perf_counter`, which nothing else does."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def move(seconds: float) -> None:
        now[0] += seconds

    return move


class Slow(Classifier):
    """One whose steps and evaluations take a known time."""

    advance = staticmethod(time.sleep)
    per_image = 0.0  # of a step, instead of SLOW

    def forward(self, images):
        step = self.per_image * len(images) or SLOW
        self.advance(step if self.training else SLOW / 5 * len(images))
        if self.training:
            self.num_seen = len(images)
        return super().forward(images)


@pytest.fixture
def made(colours, tmp_path, monkeypatch, request):
    """A model and data of complete batches, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    if "advance" in request.fixturenames:
        monkeypatch.setattr(Slow, "advance", staticmethod(request.getfixturevalue("advance")))

    def make(num: int | None = None, **options):
        options = {"batch_size": 6, "image_size": 28, "num_workers": 0, **options}
        data = read(ImageFolderData(str(colours), **options))
        train = data.splits["train"]
        full = len(train) // data.batch_size * data.batch_size or len(train)
        chosen = np.linspace(0, len(train) - 1, num or full).astype(int)  # of all classes
        data.splits["train"] = train.take(chosen)
        data.scanned = replace(data.scanned, seen=None)  # the record of all of them
        return Slow(data.class_names, "small_cnn", weights=None), data

    return make


def costs_of(model, data, seconds: float = 6.0, left: float = 1000.0, devices: int = 1) -> Costs:
    """Measure on a CPU. A twentieth of `seconds` is for timed steps, a tenth for all."""
    return measure(model, data, CPU, devices, seconds, left)


def test_each_part_takes_what_it_takes_and_nothing_is_left(made, advance, tmp_path):
    model, data = made()
    forward, calls = model.forward, []

    def compiled_at_first(images):
        advance(0 if calls else 1.0)
        calls.append(1)
        return forward(images)

    model.forward = compiled_at_first
    costs = costs_of(model, data, 30.0, devices=2)  # which share the cores
    assert model.num_seen == 6
    assert costs.train == pytest.approx(SLOW / 6) and costs.evaluate == pytest.approx(SLOW / 5)
    # what comes once, and the steps before those that are timed
    assert costs.start == pytest.approx(1.0 + 4 * SLOW)
    assert costs.decode == 0  # which takes none of that clock
    assert not list(tmp_path.iterdir()) and not multiprocessing.active_children()


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [6, 1000])
def test_short_epochs_are_timed_with_what_is_between_them(made, advance, batch_size):
    model, data = made(batch_size=batch_size)
    model.on_train_epoch_start = lambda: advance(0.7)
    costs = costs_of(model, data, 40.0)
    num = len(data.splits["train"])
    epoch = costs.train * num + costs.between
    # the timed steps need not be those of complete epochs
    assert epoch == pytest.approx(0.7 + SLOW * max(1, num // batch_size), rel=0.2)


@pytest.mark.slow
def test_a_last_batch_of_fewer_images_is_not_taken_for_a_complete_one(made, advance):
    model, data = made(num=10, batch_size=4)  # 4 + 4 + 2
    model.per_image = 0.01
    costs = costs_of(model, data, 20.0)
    assert (costs.train, costs.between) == (pytest.approx(0.01), pytest.approx(0, abs=1e-9))


@pytest.mark.slow
def test_slow_steps_end_after_three(made, advance):
    model, data = made(batch_size=1)
    model.on_train_start = lambda: advance(1.0)
    costs = costs_of(model, data, 11.0)
    assert model.trainer.global_step == 3 and costs.train == pytest.approx(SLOW)
    assert costs.start == pytest.approx(1.0 + 2 * SLOW)
    model, data = made(batch_size=1)  # the control
    costs_of(model, data, 30.0)
    assert model.trainer.global_step > 30


@pytest.mark.slow
def test_each_part_is_timed_by_the_real_clock_and_workers_end(made):
    assert min(costs_of(*made(num_workers=1))) >= 0
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("left", [1000.0, 0.0])
def test_images_are_cached_if_there_is_time(made, left):
    model, data = made(num=9 if left else 11)  # of no other test
    costs_of(model, data, left=left)
    assert (data.cache_limit_gb > 0) == (data.splits["train"].cached is not None) == (left > 0)


def test_what_would_end_the_fit_ends_the_measurement(tmp_path):
    for label in "ab":
        (tmp_path / "bad" / label).mkdir(parents=True)
        for i in range(8):
            (tmp_path / "bad" / label / f"{i}.jpg").write_bytes(b"no image")
    data = ImageFolderData(str(tmp_path / "bad"), batch_size=2, image_size=28, num_workers=0)
    model = Classifier(["a", "b"], "small_cnn", weights=None)
    with pytest.raises(ValueError, match=r"\.jpg"):
        costs_of(model, data)
