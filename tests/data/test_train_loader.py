"""Epochs that are read ahead have the batches of epochs that are read one at a time."""

import multiprocessing
import sys
import time
from typing import Any

import pytest
import torch

from finetune.data.batch_limits import FitLimits
from finetune.data.loader import end_workers, start_worker
from finetune.data.samplers import TrainBatches
from finetune.data.train_loader import EveryEpoch, TrainLoader

NUM, SIZE = 10, 4


class ReportingDataset(torch.utils.data.Dataset):
    """Gives its keys, and counts what it was asked for over all processes."""

    def __init__(self) -> None:
        self.asked = multiprocessing.Value("i", 0)

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, key: tuple[int, int]) -> tuple[int, int]:
        with self.asked:
            self.asked.value += 1
        return key


@pytest.fixture
def made():
    """What makes a loader of three epochs; its processes end with the test."""

    def make(**options: Any) -> TrainLoader:
        limits = FitLimits(**{"max_epochs": 3, **options})
        batches = TrainBatches(NUM, SIZE, 7, 0, 1)
        return TrainLoader(
            ReportingDataset(),
            batches,
            limits,
            num_workers=2,
            collate_fn=list,
            worker_init_fn=start_worker,
            timeout=60,
        )

    yield make
    end_workers()


def alone(epoch: int) -> list:
    return list(TrainBatches(NUM, SIZE, 7, 0, 1, epoch=epoch))


def read(loader: TrainLoader, epoch: int) -> list:
    loader.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
    return list(loader)


def wait_for(loader: TrainLoader, num: int, seconds: float = 4) -> int:
    """Return how many images were asked for, after some time for as many as `num`."""
    for _ in range(int(seconds / 0.02)):
        if loader.dataset.asked.value >= num:
            break
        time.sleep(0.02)
    return loader.dataset.asked.value


@pytest.mark.parametrize("max_epochs", [3, None, -1])
def test_epochs_are_those_that_are_read_by_themselves(made, max_epochs):
    loader = made(max_epochs=max_epochs)
    assert len(loader) == 3
    assert [read(loader, epoch) for epoch in range(3)] == [alone(epoch) for epoch in range(3)]
    assert alone(0) != alone(1)


def test_the_next_epoch_is_read_ahead_and_once_only(made):
    loader = made()
    read(loader, 0)
    # two batches a worker: an epoch has three
    assert wait_for(loader, 2 * NUM + SIZE) == 2 * NUM + SIZE
    pids = {child.pid for child in multiprocessing.active_children()}
    read(loader, 1), read(loader, 2)
    assert wait_for(loader, 3 * NUM + 1, seconds=1) == 3 * NUM  # nor anything behind the last
    assert {child.pid for child in multiprocessing.active_children()} == pids


@pytest.mark.parametrize("limit", [2, 0.7])
def test_epochs_that_are_limited_are_read_ahead_as_far(made, limit):
    loader = made(limit_train_batches=limit)
    assert len(loader) == 3
    assert [read(loader, epoch) for epoch in range(3)] == [alone(epoch)[:2] for epoch in range(3)]
    assert wait_for(loader, 6 * SIZE + 1, seconds=1) == 6 * SIZE


def test_what_was_trained_on_last_is_not_held(made):
    loader = made()
    loader.batch_sampler.set_epoch(0)
    batches = iter(loader)
    for _ in range(3):
        batch = next(batches)
    assert sys.getrefcount(batch) <= 2  # this name, and the call


def test_what_was_left_inside_begins_anew(made):
    loader = made()
    loader.batch_sampler.set_epoch(0)
    left = iter(loader)
    assert next(left) == alone(0)[0]
    assert read(loader, 0) == alone(0)
    assert read(loader, 2) == alone(2)  # not the one that was read ahead
    assert read(loader, 1) == alone(1)


def test_it_begins_inside_an_epoch_and_after_its_processes_ended(made):
    loader = made()
    loader.batch_sampler.sampler.epoch, loader.batch_sampler.sampler.batch = 1, 2
    assert list(loader) == alone(1)[2:]
    end_workers()
    assert read(loader, 2) == alone(2)


def test_without_a_trainer_nothing_is_read_ahead():
    assert list(EveryEpoch(TrainBatches(NUM, SIZE, 7, 0, 1), 3, 0)) == alone(0)
    loader = TrainLoader(
        ReportingDataset(),
        TrainBatches(NUM, SIZE, 7, 0, 1),
        None,
        num_workers=1,
        worker_init_fn=start_worker,
    )
    assert loader.batch_sampler.num_epochs == 0


def test_every_epoch_continues_from_where_it_stands():
    batches = TrainBatches(NUM, SIZE, 7, 0, 1, epoch=1, batch=1)
    assert list(EveryEpoch(batches, 3, 3)) == [*alone(1)[1:], *alone(2)]
    assert (batches.epoch, batches.batch) == (1, 1)  # Lightning's
