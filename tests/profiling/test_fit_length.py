"""The length of a fit within a time: the work between epochs counts as often as it occurs."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from data_files import nowhere

from finetune.profiling import fit_length
from finetune.profiling.fit_length import Deadline
from finetune.profiling.stopwatch import Costs
from finetune.runs.deferred_checkpoints import seconds_of_each

COSTS = Costs(
    start=1.0,
    batch=0.5,
    evaluate=0.01,
    decode=0.01,
    checkpoint=0.5,
    size=10**8,
    copying=0.0,
    between=0.25,
)
START = COSTS.start + fit_length._ENDING + 3 * COSTS.checkpoint  # the first and those of the end
TRAINER = {"accelerator": "cpu", "devices": 1, "strategy": "auto", "accumulate_grad_batches": 1}
TRAINER |= {"deterministic": None, "precision": "32-true"}
TRAINER |= {"val_check_interval": None, "check_val_every_n_epoch": 1}
TRAINER |= {"limit_val_batches": None, "limit_test_batches": None}


@pytest.fixture
def lengths(monkeypatch):
    """Length of a fit of this many seconds, with 320 training images in batches of 32 and 100 validation images."""
    monkeypatch.setattr(fit_length, "trial", lambda *_: COSTS)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)

    def make():
        nums = {"train": 320, "val": 100, "test": 200}
        splits = {split: replace(nowhere(num), cached=object()) for split, num in nums.items()}
        sizes = {"image_size": 128, "eval_image_size": 128}
        kept = {"cache_limit_gb": 8.0, "num_workers": 0}
        return SimpleNamespace(batch_size=32, splits=splits, **kept, **sizes), None

    def length(seconds, every_n_steps=None, is_tested=True, **options):
        config = SimpleNamespace(trainer=TRAINER | options, test_after_fit=is_tested)
        config.checkpoint_every_n_steps = every_n_steps
        return Deadline(seconds, 100.0, config).measure_length(make)

    return length


def test_an_epoch_takes_its_steps_a_validation_and_what_is_between(lengths):
    length = lengths(100)
    assert length.others == pytest.approx(START + 200 * (0.01 + 0.01))
    assert lengths(100, is_tested=False).others == pytest.approx(START)
    epoch = (10 * 0.5 + 100 * 0.01 + 0.25) * 1.02  # every fourth checkpoint is written
    assert length.training.epochs == int((100 - length.others) / epoch)
    assert length.training.seconds == pytest.approx(length.training.epochs * epoch)
    assert length.times_seen() == length.training.epochs and length.num_batches == 10


@pytest.mark.parametrize(
    ("options", "validations", "inside", "saves"),
    [
        ({}, 1, 0, 0),
        ({"val_check_interval": 1.0}, 1, 0, 0),
        ({"val_check_interval": 0.3}, 3, 3, 0),
        ({"val_check_interval": 0.35}, 3, 3, 0),  # every 3 of 10
        ({"val_check_interval": 0.04}, 10, 9, 0),
        ({"check_val_every_n_epoch": 4}, 0.25, 0, 0),
        ({"val_check_interval": 0.5, "check_val_every_n_epoch": 4}, 0.5, 0.25, 0),
        ({"check_val_every_n_epoch": None}, 1, 0, 0),
        ({"every_n_steps": 2}, 1, 0, 5),
        ({"every_n_steps": 2, "accumulate_grad_batches": 5}, 1, 0, 1),
        ({"limit_val_batches": 2}, 0.64, 0, 0),
        ({"limit_val_batches": 0.5}, 0.64, 0, 0),
        ({"limit_val_batches": 50}, 1, 0, 0),
        ({"devices": 2}, 0.5, 0, 0),  # each has half of the images
    ],
)
def test_validation_and_checkpoints_take_their_time_as_often_as_they_come(
    lengths, options, validations, inside, saves
):
    """At the ends of epochs checkpoints wait, until a best inside the next one is written after them."""
    epoch = 10 * 0.5 + validations * 100 * 0.01 + (inside + saves) * 0.5 + 0.25
    length = lengths(200, **options)
    written = min(inside, 1)
    each = written * 0.5 + (1 - written) * seconds_of_each(0.5, 1, 0.0, epoch)
    assert length.training.seconds == pytest.approx(length.training.epochs * (epoch + each))


@pytest.mark.parametrize(
    ("writing", "size", "each"),
    [
        (0.05, 10**8, 0.05),
        (0.1, 10**8, 0.1),
        (0.5, 10**8, 0.125),
        (0.5, 10**9, 0.5),
        (3.0, 10**8, 3.0 / 9),
    ],
)
def test_a_checkpoint_takes_no_more_than_its_share_of_an_epoch(
    lengths, monkeypatch, writing, size, each
):
    """But what is written soon enough never waits, nor what is very large; and nothing waits for ever."""
    monkeypatch.setattr(
        fit_length, "trial", lambda *_: COSTS._replace(checkpoint=writing, size=size)
    )
    length = lengths(200)
    assert length.training.seconds == pytest.approx(
        length.training.epochs * (10 * 0.5 + 100 * 0.01 + 0.25 + each)
    )


@pytest.mark.parametrize(
    ("options", "num"), [({"devices": 4}, 50), ({"limit_test_batches": 1}, 32)]
)
def test_the_test_takes_as_long_as_one_device_has_images(lengths, options, num):
    assert lengths(100, **options).others == pytest.approx(START + num * 0.02)


def test_the_trial_leaves_random_numbers_as_they_were(lengths, monkeypatch):
    monkeypatch.setattr(fit_length, "trial", lambda *_: (torch.rand(1), COSTS)[1])
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    lengths(100)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize("limit", [0.0, 8.0])  # or there is no room for them
def test_images_that_are_not_kept_are_decoded_for_each_validation(
    lengths, monkeypatch, limit, num_workers
):
    given = []

    def trial(model, data, trainer, seconds, most, end):
        given.append(end)
        data.cache_limit_gb, data.num_workers = limit, num_workers
        data.splits["val"] = replace(data.splits["val"], cached=None)
        return COSTS

    assert lengths(100).cache_limit_gb == 8.0
    monkeypatch.setattr(fit_length, "trial", trial)
    monkeypatch.setattr(fit_length, "num_cores", lambda: 8)
    found = lengths(100)
    epoch = 10 * 0.5 + 100 * (0.01 + 0.01 / num_workers) + 0.25
    assert found.training.seconds == pytest.approx(
        found.training.epochs * (epoch + seconds_of_each(0.5, 1, 0.0, epoch))
    )
    assert found.at_scale(0.5).training.epochs > found.training.epochs
    assert given == [200.0]
    assert found.cache_limit_gb == found.at_scale(0.5).cache_limit_gb == limit


@pytest.mark.parametrize(("devices", "expected"), [(1, 0.0), (2, 30.0)])
def test_what_the_first_process_did_alone_is_not_done_again_by_the_others(
    monkeypatch, devices, expected
):
    monkeypatch.setattr(time, "monotonic", lambda: 150.0)
    config = SimpleNamespace(
        trainer={**TRAINER, "devices": devices}, test_after_fit=True, checkpoint_every_n_steps=None
    )
    assert Deadline(600.0, 100.0, config, alone=20.0).startup == expected
