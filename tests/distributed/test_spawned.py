"""What ends the processes of `ddp_spawn` and `ddp_fork` is told as if it were in this one; test_ends.py runs them."""

import atexit
import multiprocessing
import pickle
import signal
import sys
import time
import traceback
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hanging import Hanging, receive_nothing
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    _wrap,
    start_processes,
)
from torch.utils.data import DataLoader

from finetune.commands.error_lines import exit_code, one_line
from finetune.data import decode
from finetune.distributed import spawned
from finetune.distributed.signals import Interrupted

BEFORE = "\n\n-- Process 0 terminated with the following error:\n"
TRACEBACK = 'Traceback (most recent call last):\n  File "x"\n'
run_child = partial(spawned._run, matmul_precision="highest")


def trainer_of(fn: str) -> SimpleNamespace:
    return SimpleNamespace(state=SimpleNamespace(fn=fn))


def launched(error: Exception | None, fn: str = "fit", signum: int = 0) -> str:
    def function(launcher, trainer):
        if signum:
            signal.raise_signal(signum)
        if error:
            raise error
        return "done"

    launcher = SimpleNamespace(_wrapping_function=run_child)
    return spawned._launch(function, launcher, trainer=trainer_of(fn))


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        ("ValueError: no pictures: a folder", ValueError, "no pictures: a folder"),
        (f"{decode.__name__}.DecodeError: a.png: can't be decoded", ValueError, "a.png: can't be decoded"),
        ("MemoryError: std::bad_alloc", MemoryError, "std::bad_alloc"),
        ("ZeroDivisionError: division by zero", RuntimeError, "ZeroDivisionError: division by zero"),
        ("RuntimeError: a: b", RuntimeError, "a: b"),
        ("no.such.Error: x", RuntimeError, "Error: x"),
    ],
)
def test_an_error_is_of_the_kind_that_it_was(text, kind, told):
    text = f"{TRACEBACK}{text}\n"
    with pytest.raises(kind) as raised:
        launched(ProcessRaisedException(f"{BEFORE}{text}", 0, 7))
    assert type(raised.value) is kind
    assert str(raised.value) == told


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError("NCCL error in: x\nncclSystemError: System call failed.\nLast error:\nno \n/dev/shm"),
        dist.DistNetworkError("port: 29500, EADDRINUSE\nframe #0: x"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be\nCompile with `TORCH_USE_CUDA_DSA`: x"),
        RuntimeError(f"Caught OSError in DataLoader worker process 0.\nOriginal {TRACEBACK}OSError: no card"),
        ValueError("two\nlines: both"),
        RuntimeError("Early stopping conditioned on metric `x` which is not available."),
        RuntimeError("median_cuda does not have a deterministic implementation, but you set"),
        MisconfigurationException("no such: strategy"),
    ],
)
def test_of_an_error_of_several_lines_the_same_is_told(error):
    try:
        raise error
    except Exception:
        text = traceback.format_exc()
    with pytest.raises(Exception) as raised:
        launched(ProcessRaisedException(f"{BEFORE}{text}", 0, 7))
    assert one_line(raised.value) == one_line(error) is not None
    assert exit_code(raised.value) == exit_code(error)


def exited(code: int) -> ProcessExitedException:
    return ProcessExitedException("process 1 terminated with signal SIGKILL", 1, 7, code)


def test_a_stop_has_its_code_and_says_how_to_go_on():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match=r"stopped by SIGINT; the same command with --resume goes on") as stop:
        launched(exited(143), signum=signal.SIGINT)  # they are told by SIGTERM
    assert stop.value.exit_code == 130
    with pytest.raises(Interrupted, match=r"^stopped by SIGTERM$"):
        launched(exited(143), "predict")  # it reached one of them alone
    with pytest.raises(Interrupted, match="stopped by SIGHUP"):
        launched(None, signum=signal.SIGHUP)  # after their last step
    assert signal.getsignal(signal.SIGINT) is before
    assert launched(None) == "done"


def test_one_that_was_killed_is_told_in_one_line():
    with pytest.raises(ChildProcessError, match="process 1 terminated with signal SIGKILL, and the others can't"):
        launched(exited(-9))


def test_torch_gives_the_others_time(monkeypatch):
    monkeypatch.setattr(ProcessContext, "join", ProcessContext.join)  # put back afterwards
    spawned.take_over(_MultiProcessingLauncher(SimpleNamespace(), start_method="spawn"))
    assert ProcessContext.__dict__["join"].keywords == {"grace_period": 5.0}


def broken_off(*_):
    try:
        raise Interrupted(signal.SIGTERM)
    finally:
        raise IndexError("pop from empty list")  # of a display that had half begun


def test_a_stop_ends_a_process_with_its_code_though_what_it_breaks_off_fails_to_end():
    process = multiprocessing.get_context("fork").Process(target=run_child, args=(broken_off, None, 0))
    process.start()
    process.join(60)
    assert process.exitcode == 128 + signal.SIGTERM


def take_a_batch(*_):
    next(iter(DataLoader(Hanging(receive_nothing), batch_size=None, num_workers=1)))


def test_a_worker_of_theirs_that_ends_while_it_hands_over_a_batch_is_told_of():
    with pytest.raises(ProcessRaisedException) as caught:
        start_processes(partial(run_child, take_a_batch, None), start_method="fork")
    with pytest.raises(RuntimeError) as raised:
        launched(caught.value)
    assert one_line(raised.value).startswith("a process that reads pictures was killed")


def fail(*_):
    raise ZeroDivisionError("division by zero")


def leave_nccl(function, error_file):
    atexit.register(time.sleep, 600)  # as Lightning, which waits for the others
    try:
        _wrap(partial(run_child, function, None), 0, (), error_file)
    finally:
        atexit._run_exitfuncs()  # as at a spawned process's end


@pytest.mark.parametrize(("function", "code"), [(fail, 1), (broken_off, 128 + signal.SIGTERM)])
def test_one_that_fails_does_not_wait_for_those_that_wait_for_it(monkeypatch, tmp_path, function, code):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    file = tmp_path / "error"
    process = multiprocessing.get_context("fork").Process(target=leave_nccl, args=(function, str(file)))
    process.start()
    process.join(20)
    process.kill()
    assert process.exitcode == code
    assert function is not fail or "ZeroDivisionError" in pickle.loads(file.read_bytes())  # it is written before


def tell_precision(*_):
    sys.exit(7 if torch.get_float32_matmul_precision() == "high" else 8)


def test_the_processes_multiply_as_precisely_as_the_first():
    launcher = SimpleNamespace(_wrapping_function=partial(spawned._run, tell_precision, None))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        spawned._launch(lambda launcher, trainer: None, launcher, trainer=trainer_of("fit"))
    finally:
        torch.set_float32_matmul_precision(before)
    process = multiprocessing.get_context("fork").Process(target=launcher._wrapping_function, args=(0,))
    process.start()
    process.join(60)
    assert process.exitcode == 7
