"""How long a fit can be: what comes between its epochs is reckoned as often as it comes."""

import time
from types import SimpleNamespace

import pytest
import torch

from finetune.profiling import fit_length
from finetune.profiling.fit_length import Aim, _validations
from finetune.profiling.time_trial import Costs

COSTS = Costs(start=1.0, batch=0.5, evaluate=0.01, decode=0.01, checkpoint=0.5, between=0.25)
TRAINER = {"accelerator": "cpu", "devices": 1, "strategy": "auto"}
TRAINER |= {"val_check_interval": None, "check_val_every_n_epoch": 1}


@pytest.fixture
def lengths(monkeypatch):
    """How long a fit of so many seconds is, of 320 pictures in batches of 32 with 100 of validation."""
    monkeypatch.setattr(fit_length, "trial", lambda *_: COSTS)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)

    def make():
        splits = {"train": SimpleNamespace(labels=range(320)), "val": SimpleNamespace(labels=range(100))}
        return SimpleNamespace(batch_size=32, splits=splits, image_size=128, eval_image_size=128), None

    return lambda seconds, **options: Aim(seconds, 100.0, TRAINER | options, is_tested=True).tried(make)


def test_an_epoch_takes_its_steps_a_validation_and_what_is_between(lengths):
    length = lengths(100)
    assert length.others == pytest.approx(COSTS.start + fit_length._ENDING)
    epoch = 10 * 0.5 + 100 * 0.01 + 0.5 + 0.25
    assert length.plan.epochs == int((100 - length.others) / epoch)
    assert length.plan.seconds == pytest.approx(length.plan.epochs * epoch)
    assert length.times_seen() == length.plan.epochs and length.num_batches == 10


@pytest.mark.parametrize(
    ("options", "num"),
    [
        ({}, 1),
        ({"val_check_interval": 1.0}, 1),
        ({"val_check_interval": 0.3}, 3),
        ({"check_val_every_n_epoch": 4}, 0.25),
        ({"check_val_every_n_epoch": None}, 1),
    ],
)
def test_validation_takes_its_time_as_often_as_it_comes(lengths, options, num):
    assert _validations(TRAINER | options) == num
    epoch = 10 * 0.5 + num * (100 * 0.01 + 0.5) + 0.25
    length = lengths(200, **options)
    assert length.plan.seconds == pytest.approx(length.plan.epochs * epoch)


def test_the_trial_leaves_random_numbers_as_they_were(lengths, monkeypatch):
    monkeypatch.setattr(fit_length, "trial", lambda *_: (torch.rand(1), COSTS)[1])
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    lengths(100)
    assert torch.equal(torch.rand(1), expected)
