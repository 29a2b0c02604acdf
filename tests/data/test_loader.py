"""How many workers read images, how much memory they take, and which signals they obey."""

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.resource_sharer import _resource_sharer
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from data_files import small
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from finetune.data import loader
from finetune.data.loader import (
    BatchesAhead,
    Devices,
    Loader,
    automatic_workers,
    check_shared_memory,
    end_workers,
    loader_options,
    start_worker,
)

FORK = multiprocessing.get_context("fork")


@pytest.mark.parametrize(
    ("cores", "alone", "on_a_cpu", "with_4_gpus"), [(1, 1, 0, 1), (2, 2, 1, 1), (64, 8, 1, 8)]
)
def test_automatic_workers_leave_cores_to_the_network(
    monkeypatch, cores, alone, on_a_cpu, with_4_gpus
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    assert automatic_workers(None) == alone
    assert automatic_workers(Devices("cpu", 1)) == on_a_cpu
    assert automatic_workers(Devices("cuda", 4)) == with_4_gpus


def test_cores_that_srun_gave_a_task_are_not_shared_again(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    assert automatic_workers(Devices("cuda", 4)) == 2
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert automatic_workers(Devices("cuda", 4)) == 8


@pytest.mark.parametrize(
    ("cores", "wanted", "num_devices", "started"),
    [(2, 8, 1, 8), (2, 5000, 1, 8), (2, 8, 4, 2), (1, 9, 8, 1)],
)
def test_no_more_workers_are_started_than_the_cores_can_use(
    monkeypatch, caplog, cores, wanted, num_devices, started
):
    loader._warn_of_bound.cache_clear()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    for _ in range(2):  # several loaders tell it once
        assert loader_options(Devices("cuda", num_devices), wanted, 1)["num_workers"] == started
    reported = f"data.num_workers {wanted}: only {started} are started for each device, 4 for each of {cores} cores"
    assert caplog.messages == ([reported] if wanted > started else [])


def test_shared_memory_must_hold_all_batches_on_their_way(monkeypatch, tmp_path):
    monkeypatch.setattr(loader, "_SHARED_MEMORY", tmp_path)
    # Docker's
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 * 2**20))
    batch = 64 * 3 * 224 * 224
    check_shared_memory(2, batch)  # 55 MB
    check_shared_memory(0, 100 * batch)  # nothing is handed over
    with pytest.raises(
        ValueError, match="has 64 MB free, 3 workers need up to 83 MB.*--shm-size=8g.*num_workers 0"
    ):
        check_shared_memory(3, batch)
    monkeypatch.setattr(loader, "_SHARED_MEMORY", tmp_path / "absent")  # not every system has it
    check_shared_memory(3, batch)


def test_all_devices_of_a_machine_share_its_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(loader, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 * 2**20))
    batch = 64 * 3 * 224 * 224  # 55 MB on their way with two workers
    assert loader_options(Devices("cuda", 1), 2, batch)["num_workers"] == 2
    reported = "64 MB free, 4 workers of all devices need up to 110 MB"
    with pytest.raises(ValueError, match=reported):
        loader_options(Devices("cuda", 2), 2, batch)
    monkeypatch.setenv("SLURM_STEP_ID", "0")  # srun gives each task cores of its own, but no memory
    with pytest.raises(ValueError, match=reported):
        loader_options(Devices("cuda", 2), 2, batch)


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


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_workers_obey_the_main_process_alone(signum):
    worker, pipe = started()
    for _ in range(2):  # a job's scheduler may send it to every process, and again
        subprocess.run(["kill", f"-{int(signum)}", str(worker.pid)], check=True)
        assert not has_ended(pipe, 0.2)
    worker.terminate()  # as multiprocessing does at exit, before it waits without a limit
    worker.join(5)
    assert worker.exitcode == 0  # else the DataLoader reports a failure


def start_worker_that_ignores_the_first_sigterm(worker_id: int) -> None:
    """Control: it can't tell a scheduler's from the main process's."""
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


@pytest.mark.slow
def test_control_of_the_main_process_alone():
    worker, pipe = started(start_worker_that_ignores_the_first_sigterm)
    worker.terminate()
    assert not has_ended(pipe, 1)
    worker.kill()


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


# torch's news that it was killed
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", [Loader, pytest.param(DataLoader, marks=pytest.mark.slow)])
def test_a_worker_obeys_from_its_first_moment(kind, monkeypatch):
    """It is forked with the signal handlers of the main process, which could swallow the only SIGTERM."""
    original = signal_handling._set_worker_signal_handlers  # the first that a worker does
    monkeypatch.setattr(
        signal_handling, "_set_worker_signal_handlers", lambda: time.sleep(1) or original()
    )
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        iterator: Any = iter(
            kind([0], num_workers=1, worker_init_fn=start_worker, multiprocessing_context="fork")
        )
        (worker,) = iterator._workers
        worker.terminate()
        worker.join(3)
        assert worker.is_alive() == (kind is DataLoader)  # the control
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
        worker.kill()
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("when", ["before", "while"])
def test_an_end_that_a_killed_worker_interrupts_can_be_asked_for_again(when, monkeypatch):
    kept = [
        Loader([0], num_workers=2, multiprocessing_context="fork", worker_init_fn=start_worker)
        for _ in range(2)
    ]
    iterators: list[Any] = [iter(one) for one in kept]
    cls, news = type(iterators[0]), ["a worker was killed"]
    place = {"before": "_shutdown_workers", "while": "_mark_worker_as_unavailable"}[when]
    own = getattr(cls, place)

    def interrupted(iterator: Any, *args: Any, **options: Any) -> None:
        if news:
            raise RuntimeError(news.pop())
        own(iterator, *args, **options)

    monkeypatch.setattr(cls, place, interrupted)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="killed"):
        end_workers()
    assert any(worker.is_alive() for iterator in iterators for worker in iterator._workers)
    end_workers()
    assert not any(worker.is_alive() for iterator in iterators for worker in iterator._workers)
    assert time.monotonic() - began < 5  # what Python's garbage collector waits for one of them


def left(start, reported) -> None:
    os.dup2(os.open(reported, os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr, sys.excepthook = sys.__stderr__, sys.__excepthook__
    start(0)
    address, _ = _resource_sharer.register(None, None)  # starts the thread that hands batches over
    with socket.socket(socket.AF_UNIX) as main_process:
        main_process.connect(address)
        main_process.recv(4)  # they have begun to talk
    time.sleep(0.5)


@pytest.mark.slow
def test_a_worker_that_is_left_while_it_hands_over_a_batch_says_nothing(tmp_path):
    reported = {}
    for name, start in {"ours": start_worker, "without": lambda worker_id: None}.items():
        worker = FORK.Process(target=left, args=(start, tmp_path / name))
        worker.start()
        worker.join(60)
        reported[name] = (tmp_path / name).read_text()
    assert reported["ours"] == ""
    assert "resource_sharer.py" in reported["without"]


@pytest.mark.parametrize(
    ("is_validated", "is_pinned", "expected"),
    [(True, False, 5), (False, False, 3), (True, True, 3)],
)
def test_training_is_reckoned_with_first_and_for_validation_too(is_validated, is_pinned, expected):
    ahead = BatchesAhead()
    fit = (is_validated, is_pinned)
    assert ahead("val", False, *fit) == 3  # a sanity check, before training has begun
    assert ahead("train", True, *fit) == expected
    # later, or loaded anew
    assert ahead("val", False, *fit) == ahead("train", True, *fit) == 0
    assert ahead("test", False, *fit) == 3


@pytest.mark.parametrize(
    ("limit", "val_fraction", "is_validated"), [(1.0, 0.1, True), (0, 0.1, False), (1.0, 0, False)]
)
def test_the_data_module_says_whether_a_fit_validates(colours, limit, val_fraction, is_validated):
    data = small(colours, val_fraction=val_fraction)
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    data.trainer = pl.Trainer(limit_val_batches=limit, **options)
    asked = []
    data._ahead = lambda *numbers: asked.append(numbers)
    data.train_dataloader()
    assert asked == [("train", True, is_validated, False)]
