"""--data.num_workers: the processes that read images, their memory, signals and ends, and reading ahead."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections import namedtuple
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
import torch
from data_files import small

from finetune.data.batch_limits import FitLimits
from finetune.data.loader import (
    Devices,
    TrainLoader,
    automatic_workers,
    check_shared_memory,
    end_workers,
    loader_options,
    start_worker,
)
from finetune.data.samplers import TrainBatches

FORK = multiprocessing.get_context("fork")

# Number and memory


@pytest.fixture
def machine(monkeypatch):
    """Sets the cores of this machine, and its free shared memory in megabytes."""

    def of(cores: int, shared: int = 1000) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
        usage = namedtuple("usage", "free")(shared * 2**20)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    return of


@pytest.mark.parametrize(
    ("cores", "alone", "on_a_cpu", "with_4_gpus"),
    [(1, 1, 0, 1), (2, 2, 1, 1), (64, 8, 1, 8), (8, 8, 1, 2)],
)
def test_automatic_workers_leave_cores_to_the_network(
    machine, monkeypatch, cores, alone, on_a_cpu, with_4_gpus
):
    machine(cores)
    assert automatic_workers(None) == alone
    assert automatic_workers(Devices("cpu", 1)) == on_a_cpu
    assert automatic_workers(Devices("cuda", 4)) == with_4_gpus
    monkeypatch.setenv("SLURM_STEP_ID", "0")  # the cores that srun gave a task are not shared again
    assert automatic_workers(Devices("cuda", 4)) == alone


@pytest.mark.parametrize(
    ("cores", "wanted", "num_devices", "started"),
    [(2, 8, 1, 8), (2, 5000, 1, 8), (2, 9, 4, 2)],
)
def test_no_more_workers_are_started_than_the_cores_can_use(
    machine, cores, wanted, num_devices, started
):
    machine(cores)
    assert loader_options(Devices("cuda", num_devices), wanted, 1)["num_workers"] == started


def test_shared_memory_must_hold_all_batches_on_their_way(machine, monkeypatch, colours, on_device):
    machine(8, shared=64)  # Docker's
    batch = 64 * 3 * 224 * 224
    check_shared_memory(2, batch)  # 55 MB
    check_shared_memory(0, 100 * batch)  # nothing is handed over
    with pytest.raises(ValueError, match="64 MB free, 3 workers .*--shm-size=8g.*num_workers 0"):
        check_shared_memory(3, batch)
    assert loader_options(Devices("cuda", 1), 2, batch)["num_workers"] == 2
    for step in ("", "0"):  # srun gives each task cores of its own, but no memory
        if step:
            monkeypatch.setenv("SLURM_STEP_ID", step)
        with pytest.raises(ValueError, match="64 MB free, 4 workers of all devices"):
            loader_options(Devices("cuda", 2), 2, batch)
    machine(8, shared=4)
    # batches of 0.6 MB: 3 for each worker, or 5 with those of validation
    options = {"num_workers": 2, "image_size": 224, "batch_size": 4}
    assert on_device(small(colours, **options, val_fraction=0)).train_dataloader()
    assert on_device(small(colours, **options), limit_val_batches=0).train_dataloader()
    with pytest.raises(ValueError, match="--shm-size"):
        on_device(small(colours, **options)).train_dataloader()
    options["num_workers"] = 0  # takes none
    assert on_device(small(colours, **options)).train_dataloader()


# Signals


def worked(start, pipe) -> None:
    start(0)
    pipe.send(torch.get_num_threads())
    time.sleep(60)


def started(start=start_worker) -> tuple[BaseProcess, Connection]:
    """A worker, and a pipe that ends with it."""
    ours, its = FORK.Pipe(duplex=False)
    worker = FORK.Process(target=worked, args=(start, its), daemon=True)
    worker.start()
    its.close()
    assert ours.poll(30) and ours.recv() == 1
    return worker, ours


def has_ended(pipe: Connection, seconds: float = 5) -> bool:
    """Whether all processes that hold the other end have."""
    if not pipe.poll(seconds):
        return False
    with pytest.raises(EOFError):
        pipe.recv()
    return True


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_workers_obey_the_main_process_alone(signum):
    worker, pipe = started()
    for _ in range(2):  # a job's scheduler may send it to every process, and again
        subprocess.run(["kill", f"-{int(signum)}", str(worker.pid)], check=True)
        assert not has_ended(pipe, 0.2)
    worker.terminate()  # as multiprocessing does at exit, before it waits without a limit
    worker.join(5)
    assert worker.exitcode == 0  # else the DataLoader reports a failure


def test_workers_end_with_a_main_process_that_is_killed():
    ours, its = FORK.Pipe(duplex=False)

    def main() -> None:
        ours.close()
        for _ in range(3):  # each also holds its elder brothers' pipes
            worker = FORK.Process(target=worked, args=(start_worker, its), daemon=True)
            worker.start()
        time.sleep(60)

    process = FORK.Process(target=main)
    process.start()
    its.close()
    for _ in range(3):
        assert ours.poll(30) and ours.recv() == 1
    process.kill()
    assert has_ended(ours)


# Epochs that are read ahead


NUM, SIZE = 10, 4


class Keys(torch.utils.data.Dataset):
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

    def make(**limits) -> TrainLoader:
        options = {"collate_fn": list, "worker_init_fn": start_worker, "timeout": 60}
        fit = FitLimits(**{"max_epochs": 3, **limits})
        return TrainLoader(Keys(), TrainBatches(NUM, SIZE, 7, 0, 1), fit, num_workers=2, **options)

    yield make
    end_workers()


def alone(epoch: int) -> list:
    return list(TrainBatches(NUM, SIZE, 7, 0, 1, epoch=epoch))


def read(loader: TrainLoader, epoch: int) -> list:
    loader.batch_sampler.set_epoch(epoch)
    return list(loader)


def wait_for(loader: TrainLoader, num: int, seconds: float = 4) -> int:
    """Return how many images were asked for, after some time for as many as `num`."""
    for _ in range(int(seconds / 0.02)):
        if loader.dataset.asked.value >= num:
            break
        time.sleep(0.02)
    return loader.dataset.asked.value


def test_epochs_that_are_read_ahead_are_those_read_by_themselves(made):
    loader = made()
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


def test_limit_train_batches_is_read_ahead_as_far(made):
    loader = made(limit_train_batches=0.7)
    assert len(loader) == 3
    assert [read(loader, epoch) for epoch in range(3)] == [alone(epoch)[:2] for epoch in range(3)]
    assert wait_for(loader, 6 * SIZE + 1, seconds=1) == 6 * SIZE


def test_an_epoch_that_was_left_begins_anew_also_after_its_processes_ended(made):
    loader = made()
    loader.batch_sampler.set_epoch(0)
    batches = iter(loader)
    assert next(batches) == alone(0)[0]
    assert read(loader, 0) == alone(0)
    assert read(loader, 2) == alone(2)  # not the one that was read ahead
    assert read(loader, 1) == alone(1)
    loader.batch_sampler.sampler.epoch, loader.batch_sampler.sampler.batch = 1, 2
    assert list(loader) == alone(1)[2:]  # inside an epoch
    end_workers()
    assert read(loader, 2) == alone(2)
