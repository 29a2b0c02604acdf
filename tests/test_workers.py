"""How many processes read pictures, with what memory, and that they leave signals alone."""

import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from finetune import workers
from finetune.workers import automatic_workers, check_shared_memory, start_worker


def trainer(device: str, num_devices: int) -> SimpleNamespace:
    return SimpleNamespace(num_devices=num_devices, strategy=SimpleNamespace(root_device=torch.device(device)))


@pytest.mark.parametrize(("cores", "alone", "on_a_cpu", "beside_4_gpus"), [(1, 1, 0, 1), (2, 2, 1, 1), (64, 8, 1, 8)])
def test_automatic_workers_leave_cores_to_the_network(monkeypatch, cores, alone, on_a_cpu, beside_4_gpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    assert automatic_workers(None) == alone
    assert automatic_workers(trainer("cpu", 1)) == on_a_cpu
    assert automatic_workers(trainer("cuda", 4)) == beside_4_gpus


def test_cores_that_srun_gave_a_task_are_not_shared_again(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    assert automatic_workers(trainer("cuda", 4)) == 2
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert automatic_workers(trainer("cuda", 4)) == 8


def test_shared_memory_must_hold_all_batches_on_their_way(monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 * 2**20))  # Docker's
    batch = 64 * 3 * 224 * 224
    check_shared_memory(2, batch)  # 55 MB
    check_shared_memory(0, 100 * batch)  # nothing is handed over
    with pytest.raises(ValueError, match="has 64 MB free, 3 workers need up to 83 MB.*--shm-size=8g.*num_workers 0"):
        check_shared_memory(3, batch)
    monkeypatch.setattr(workers, "_SHARED_MEMORY", tmp_path / "absent")  # not every system has it
    check_shared_memory(3, batch)


def test_workers_leave_signals_to_the_main_process(monkeypatch):
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    try:
        start_worker(0)
        assert torch.get_num_threads() == 1
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGTERM)  # ignored: a job's scheduler sends it to every process
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # the next one, from the main process, is not
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


_LEFT = """
import socket, sys, time
from multiprocessing.resource_sharer import _resource_sharer
from finetune.workers import start_worker
if sys.argv[1] == "ours":
    start_worker(0)
address, _ = _resource_sharer.register(None, None)  # starts the thread that hands batches over
main_process = socket.socket(socket.AF_UNIX)
main_process.connect(address)
main_process.recv(4)  # they have begun to talk
main_process.close()
time.sleep(0.5)
"""


def test_a_worker_that_is_left_while_it_hands_over_a_batch_says_nothing():
    told = {
        way: subprocess.run([sys.executable, "-c", _LEFT, way], capture_output=True, text=True, timeout=60).stderr
        for way in ("ours", "without")
    }
    assert told["ours"] == ""
    assert "resource_sharer.py" in told["without"]
