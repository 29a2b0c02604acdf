"""The trial of a fit, for --minutes: it measures what each part takes, and leaves no trace."""

import math
import multiprocessing
import time
from dataclasses import replace

import numpy as np
import pytest
from data_files import read

from finetune import Classifier, ImageFolderData
from finetune.profiling.time_trial import trial
from finetune.runs import deferred_checkpoints
from finetune.settings.layers import replaced
from finetune.settings.schema import TrainerSettings

ONE = TrainerSettings(accelerator="cpu", devices=1, precision="32-true")
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


def test_each_part_takes_what_it_takes_and_nothing_is_left(made, advance, tmp_path):
    model, data = made()
    forward, calls = model.forward, []

    def compiled_at_first(images):
        advance(0 if calls else 1.0)
        calls.append(1)
        return forward(images)

    model.forward = compiled_at_first
    costs = trial(model, data, ONE, seconds=0.3)
    assert costs.batch == pytest.approx(SLOW) and costs.evaluate == pytest.approx(SLOW / 5)
    assert costs.start == pytest.approx(1.0)  # what comes once is in the start alone
    assert (costs.decode, costs.checkpoint) == (0, 0)  # which take none of that clock
    assert not list(tmp_path.iterdir()) and not multiprocessing.active_children()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch_size", "batch", "between"),
    [(6, SLOW, 0.7), (1000, 0.7 + SLOW, 0)],  # epochs of one batch are taken as a whole
)
def test_what_is_between_epochs_is_no_part_of_their_steps(
    made, advance, batch_size, batch, between
):
    model, data = made(batch_size=batch_size)
    model.on_train_epoch_start = lambda: advance(0.7)
    costs = trial(model, data, ONE, seconds=5.0)
    assert (costs.batch, costs.between) == (pytest.approx(batch), pytest.approx(between))
    assert batch_size == 1000 or costs.start == pytest.approx(0.7)  # before the first


@pytest.mark.slow
def test_a_last_batch_of_fewer_images_is_not_taken_for_a_complete_one(made, advance):
    model, data = made(num=10, batch_size=4)  # 4 + 4 + 2
    model.per_image = 0.01
    costs = trial(model, data, ONE, seconds=1.0)
    assert (costs.batch, costs.between) == (pytest.approx(0.04), pytest.approx(0, abs=1e-9))


@pytest.mark.slow
def test_a_short_trial_of_slow_steps_ends_after_three(made, advance):
    model, data = made(batch_size=1)
    model.on_train_start = lambda: advance(1.0)
    few, num = trial(model, data, ONE, seconds=0.1, most=1.1), int(model.trainer.global_step)
    assert num == 3 and (few.batch, few.start) == (pytest.approx(SLOW), pytest.approx(1.0))
    model, data = made(batch_size=1)  # the control
    trial(model, data, ONE, seconds=0.1, most=5.0)
    assert model.trainer.global_step == 8


@pytest.mark.slow
@pytest.mark.parametrize(("head_init", "seconds"), [("xavier", 0.0), ("probe", 7.0)])
def test_what_the_fit_finds_made_is_not_of_its_start(made, advance, head_init, seconds):
    """Lists and features of images are; a head from a probe is not, because it is fitted again."""
    model, data = made()
    model.head_init = head_init
    model.on_fit_start = lambda: advance(7.0)
    loader = data.loader
    data.loader = lambda *args, **options: (advance(9.0), loader(*args, **options))[1]
    assert trial(model, data, ONE, seconds=0.3).start == pytest.approx(seconds, abs=1e-9)


@pytest.mark.slow
def test_each_part_is_timed_by_the_real_clock_and_workers_end(made, monkeypatch):
    # or none would ever wait, and no copy be made
    monkeypatch.setattr(deferred_checkpoints, "QUICK", 0.0)
    assert min(trial(*made(num_workers=1), ONE, seconds=0.1)) > 0
    assert not multiprocessing.active_children()


def test_the_checkpoint_is_timed_where_the_fit_writes_its_own(made, monkeypatch, tmp_path):
    monkeypatch.setattr(deferred_checkpoints, "QUICK", math.inf)  # or a copy is made, too
    disk = tmp_path / "disk"
    disk.mkdir()
    seen = []
    model, data = made()
    model.on_save_checkpoint = lambda _: seen.extend(path.name for path in disk.iterdir())
    trial(model, data, replaced(ONE, {"default_root_dir": str(disk / "runs/mine")}), seconds=0.1)
    assert len(seen) == 1 and seen[0].startswith(".finetune-trial-")
    assert not list(disk.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "num"), [(1, 6), (4, 2)])
def test_a_device_has_its_share_of_a_batch(made, devices, num):
    """But no device one image by itself, on which batch norm could not train."""
    model, data = made()
    trial(model, data, replaced(ONE, {"devices": devices}), seconds=0.1)
    assert model.num_seen == num


def test_what_would_end_the_fit_ends_the_trial(tmp_path):
    for label in "ab":
        (tmp_path / "bad" / label).mkdir(parents=True)
        for i in range(8):
            (tmp_path / "bad" / label / f"{i}.jpg").write_bytes(b"no image")
    data = ImageFolderData(str(tmp_path / "bad"), batch_size=2, image_size=28, num_workers=0)
    model = Classifier(["a", "b"], "small_cnn", weights=None)
    with pytest.raises(ValueError, match=r"\.jpg"):
        trial(model, data, replaced(ONE, {"default_root_dir": str(tmp_path)}), seconds=0.1)
