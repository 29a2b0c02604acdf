"""The time trial of a fit reports the time of its steps, and leaves no trace."""

import errno
import logging
import math
import multiprocessing
import os
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from pytorch_lightning.accelerators import CUDAAccelerator

from finetune import Classifier, ImageFolderData
from finetune.profiling import step_timing, time_trial
from finetune.profiling.stopwatch import _BETWEEN
from finetune.profiling.time_trial import (
    _first,
    _per_device_threads,
    num_devices_of,
    startup_seconds,
    trial,
)
from finetune.runs import deferred_checkpoints
from finetune.system.cache_dir import IMAGES, cache_dir

ONE = {"accelerator": "cpu", "devices": 1, "precision": "32-true", "accumulate_grad_batches": 1}
ONE |= {"strategy": "auto", "default_root_dir": "runs", "deterministic": None}
SLOW = 0.05  # seconds


class Slow(Classifier):
    """One whose steps and evaluations take a known time."""

    advance = staticmethod(time.sleep)

    def forward(self, images):
        self.advance(SLOW if self.training else SLOW / 5 * len(images))
        self.num_seen = len(images)
        return super().forward(images)


@pytest.fixture
def made(colours):
    def make(**options):
        data = ImageFolderData(
            str(colours), **{"batch_size": 6, "image_size": 28, "num_workers": 0, **options}
        )
        num = len(data.splits["train"])
        # steps take the same, whatever is in
        full = num // data.batch_size * data.batch_size or num
        data.splits["train"] = data.splits["train"].take(np.arange(full))
        data.scanned = replace(data.scanned, seen=None)  # the record of all of them
        return Slow(data.class_names, "small_cnn", weights=None), data

    return make


@pytest.fixture
def advance(clock, monkeypatch):
    """Move the clock, which nothing else does: for tests in which nothing else takes time."""
    monkeypatch.setattr(Slow, "advance", staticmethod(clock))
    return clock


@pytest.mark.slow
def test_a_device_with_a_queue_is_not_waited_for_at_every_step(made, clock, tmp_path, monkeypatch):
    """It computes SLOW while the next steps are prepared, which take a fifth of that."""
    monkeypatch.chdir(tmp_path)
    done = [0.0]

    def launch(seconds: float) -> None:
        clock(seconds / 5)
        done[0] = max(done[0], time.perf_counter()) + seconds

    monkeypatch.setattr(Slow, "advance", staticmethod(launch))
    monkeypatch.setattr(
        step_timing, "synchronize", lambda device: clock(max(0.0, done[0] - time.perf_counter()))
    )
    costs = trial(*made(batch_size=2), ONE, seconds=0.3)
    assert costs.batch == pytest.approx(SLOW, rel=0.1)  # 1.2 times as much if it waits for each


def test_it_computes_as_the_fit_will(made, advance, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {}
    full = time_trial.pl.Trainer
    monkeypatch.setattr(
        time_trial.pl, "Trainer", lambda **options: given.update(options) or full(**options)
    )
    before = torch.are_deterministic_algorithms_enabled()
    try:
        trial(*made(), {**ONE, "deterministic": True}, seconds=0.3)
    finally:
        torch.use_deterministic_algorithms(before)
    assert given["deterministic"] is True


@pytest.mark.parametrize("is_cuda", [True, False])
def test_a_gpu_multiplies_in_tf32_from_the_first_step(made, monkeypatch, is_cuda):
    events = []
    monkeypatch.setattr(time_trial, "_is_cuda", lambda accelerator: is_cuda)
    monkeypatch.setattr(time_trial, "allow_tf32", lambda: events.append("allowed"))
    monkeypatch.setattr(Slow, "advance", staticmethod(lambda seconds: events.append("step")))
    trial(*made(), ONE, seconds=0.1)
    assert (events[0], events.count("allowed")) == (("allowed", 1) if is_cuda else ("step", 0))


@pytest.mark.slow
@pytest.mark.parametrize("before", [None, "FASTEST_FIRST"])
def test_processes_that_are_started_later_count_gpus_as_this_one(made, monkeypatch, before):
    name, seen = "CUDA_DEVICE_ORDER", []
    monkeypatch.setenv(name, before or "")  # put back afterwards
    if before is None:
        monkeypatch.delenv(name)

    def start() -> None:
        CUDAAccelerator.set_nvidia_flags(0)  # as on a GPU
        seen.append(os.environ[name])

    model, data = made()
    model.on_train_start = start
    trial(model, data, ONE, seconds=0.1)
    assert (seen, os.environ.get(name)) == (["PCI_BUS_ID"], before)


def test_the_parts_take_what_they_take(made, advance, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    costs = trial(*made(), ONE, seconds=0.3)
    assert costs.batch == pytest.approx(SLOW) and costs.evaluate == pytest.approx(SLOW / 5)
    # the first steps take as long as the others, and nothing else
    assert costs.start == pytest.approx(0, abs=1e-9)
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
def test_a_last_batch_of_fewer_images_is_not_taken_for_a_complete_one(made, monkeypatch, advance):
    model, data = made(batch_size=4)
    forward = Slow.forward
    monkeypatch.setattr(
        Slow, "forward", lambda self, x: (advance(0.01 * len(x)), forward(self, x))[1]
    )
    monkeypatch.setattr("test_time_trial.SLOW", 0.0)
    # 4 + 4 + 2
    data.splits["train"] = data.splits["train"].take(np.arange(10))
    costs = trial(model, data, ONE, seconds=1.0)
    assert (costs.batch, costs.between) == (pytest.approx(0.04), pytest.approx(0, abs=1e-9))


def test_a_trial_that_sees_no_epoch_end_takes_the_usual(made, advance):
    costs = trial(*made(batch_size=1), ONE, seconds=0.2)
    assert costs.between == _BETWEEN


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
def test_each_part_is_timed_and_workers_end(made, monkeypatch):
    # or none would ever wait, and no copy be made
    monkeypatch.setattr(deferred_checkpoints, "QUICK", 0.0)
    costs = trial(*made(num_workers=1), ONE, seconds=0.1)
    assert min(costs) > 0
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_what_comes_once_is_in_the_start_alone(made, advance):
    model, data = made()
    forward, calls = model.forward, []

    def compiled_at_first(images):
        advance(0 if calls else 1.0)
        calls.append(1)
        return forward(images)

    model.forward = compiled_at_first
    costs = trial(model, data, ONE, seconds=0.3)
    assert (costs.start, costs.batch) == (pytest.approx(1.0), pytest.approx(SLOW))


@pytest.mark.slow
def test_what_is_kept_for_the_fit_is_not_of_its_start(made, advance):
    model, data = made()
    loader = data.loader
    data.loader = lambda *args, **options: (advance(7.0), loader(*args, **options))[1]
    assert trial(model, data, ONE, seconds=0.3).start == pytest.approx(0, abs=1e-9)


def test_the_checkpoint_is_timed_where_the_fit_writes_its_own(made, monkeypatch, tmp_path):
    monkeypatch.setattr(deferred_checkpoints, "QUICK", math.inf)  # or a copy is made, too
    (tmp_path / "disk").mkdir()
    seen = []
    model, data = made()
    model.on_save_checkpoint = lambda checkpoint: seen.extend(
        path.name for path in (tmp_path / "disk").iterdir()
    )
    trial(model, data, ONE | {"default_root_dir": str(tmp_path / "disk/runs/mine")}, seconds=0.1)
    assert len(seen) == 1 and seen[0].startswith(".finetune-trial-")
    assert not list((tmp_path / "disk").iterdir())


def test_a_folder_that_nothing_can_be_written_to_is_reported(made, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/some/.finetune-trial-x")

    monkeypatch.setattr(time_trial.tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(
        OSError,
        match=r"^nothing can be written in .*: Permission denied; --out sets another folder",
    ):
        trial(*made(), ONE, seconds=0.1)


def test_a_head_is_fitted_in_silence(made, caplog):
    _, data = made()
    model = Classifier(data.class_names, "small_cnn", weights=None, head_init="probe")
    before = logging.getLogger("finetune.features.linear_probe").level
    with caplog.at_level("INFO", "finetune"):
        trial(model, data, ONE, seconds=0.1)
    assert not [text for text in caplog.messages if "head fitted" in text]
    assert logging.getLogger("finetune.features.linear_probe").level == before


def test_batches_that_the_network_can_not_train_on_are_reported_as_a_fit_reports_them(made):
    _, data = made(image_size=32, batch_size=1)
    model = Classifier(data.class_names, "resnet18", weights=None)
    with pytest.raises(
        ValueError, match="the batch norm of resnet18 cannot train on one at 32 pixels"
    ):
        trial(model, data, ONE, seconds=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [2, 6])
def test_no_device_has_a_batch_of_one_image_by_itself(made, batch_size):
    """The global batch has more images, and synchronised batch norm can train on them."""
    _, data = made(image_size=32, batch_size=batch_size)
    # 3 + 3 + 3 + 1
    data.splits["train"] = data.splits["train"].take(np.arange(10))
    model = Classifier(data.class_names, "resnet18", weights=None)
    assert trial(model, data, ONE | {"devices": 2}, seconds=0.1).batch > 0


def test_other_processes_take_as_long_to_be_there_as_this_one():
    assert startup_seconds({"accelerator": "cpu", "devices": 2}, 9.0) == 9.0
    assert startup_seconds({"accelerator": "cpu", "devices": 1}, 9.0) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "num"), [(1, 6), (4, 2)])
def test_a_device_has_its_share_of_a_batch_and_of_the_cores(made, devices, num, monkeypatch):
    monkeypatch.setattr(time_trial, "num_cores", lambda: 4)
    threads, before = [], torch.get_num_threads()
    model, data = made()
    forward = model.forward
    model.forward = lambda images: (threads.append(torch.get_num_threads()), forward(images))[1]
    trial(model, data, ONE | {"devices": devices}, seconds=0.1)
    assert model.num_seen == num
    assert (
        set(threads) == ({4 // devices} if devices > 1 else {before})
        and torch.get_num_threads() == before
    )


def test_the_number_of_devices_is_that_which_is_meant():
    assert [num_devices_of("cpu", devices) for devices in (1, "2", "auto", [0, 1])] == [1, 2, 1, 2]
    assert num_devices_of("auto", "auto") == max(1, torch.cuda.device_count())


def test_the_first_of_the_fit_s_devices_is_tried(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cases = {"1,": [1], "2,3": [2], "2": 1, "auto": 1}
    assert {devices: _first("auto", devices) for devices in cases} == cases
    assert (_first("gpu", [3, 1]), _first("cuda", 2), _first("cpu", [3, 1])) == ([3], 1, 1)


@pytest.mark.slow
def test_what_is_made_before_the_first_step_and_kept_is_not_of_its_start(made, advance):
    """Cached features of a frozen backbone are not part of it; a head from a probe is, because it is fitted again."""
    for head_init, seconds in (("xavier", 0.0), ("probe", 7.0)):
        model, data = made()
        model.head_init = head_init
        model.on_fit_start = lambda: advance(7.0)
        assert trial(model, data, ONE, seconds=0.3).start == pytest.approx(seconds, abs=1e-9)


@pytest.mark.parametrize(("given", "num"), [("auto", 4), (3, 3)])
def test_a_device_has_its_share_of_the_workers(made, monkeypatch, given, num):
    monkeypatch.setattr(time_trial, "automatic_workers", lambda devices: 8 // devices.num)
    model, data = made(num_workers=given)

    def asked() -> None:
        raise LookupError(f"{data.num_workers} workers")

    monkeypatch.setattr(data, "train_dataloader", asked)
    with pytest.raises(LookupError, match=f"{num} workers"):
        trial(model, data, {**ONE, "devices": 2}, seconds=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"crop_and_flip": False}])
def test_images_are_not_kept_where_there_is_no_time_to_see_them_twice(
    made, advance, monkeypatch, tmp_path, options
):
    from finetune.data import image_cache, samples

    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(image_cache, "_MIN_SAVED", 1)
    monkeypatch.setattr(time_trial, "num_cores", lambda: 2)
    decode = samples.decode
    monkeypatch.setattr(
        samples, "decode", lambda *args, **kwargs: (advance(0.5), decode(*args, **kwargs))[1]
    )
    _, data = made(**options)
    num, num_val = (len(data.splits[split]) for split in ("train", "val"))
    # two cores decode; a step of six takes SLOW
    enough = 0.5 * (num + num_val) / 2 + 2 * num / 6 * SLOW
    # in the end they are there
    for seconds, is_kept in ((0.95 * enough, False), (1.5 * enough, True), (0.0, True)):
        model, data = made(**options)
        trial(model, data, ONE, seconds=0.3, end=time.monotonic() + seconds)
        assert (data.cache_limit_gb, len([*cache_dir().glob(f"*{IMAGES}")])) == (
            (8.0, 1) if is_kept else (0.0, 0)
        )


def test_the_cores_come_back_after_an_error():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), _per_device_threads(2):
        raise KeyError
    assert torch.get_num_threads() == before


def test_what_would_end_the_fit_ends_the_trial(made, colours, tmp_path):
    for label in "ab":
        (tmp_path / "bad" / label).mkdir(parents=True)
        for i in range(8):
            (tmp_path / "bad" / label / f"{i}.jpg").write_bytes(b"no image")
    data = ImageFolderData(str(tmp_path / "bad"), batch_size=2, image_size=28, num_workers=0)
    with pytest.raises(ValueError, match=r"\.jpg"):
        trial(Classifier(data.class_names, "small_cnn", weights=None), data, ONE, seconds=0.1)
