"""What ends the processes of `ddp_spawn` and `ddp_fork` is told as if it were in this one; test_ends.py runs them."""

import multiprocessing
import signal
from functools import partial
from types import SimpleNamespace

import pytest
from hanging import Hanging, receive_nothing
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)
from torch.utils.data import DataLoader

from finetune.commands.error_lines import one_line
from finetune.data import decode
from finetune.distributed import spawned
from finetune.distributed.signals import Interrupted


def launched(error: Exception | None, fn: str = "fit", signum: int = 0) -> str:
    def function(launcher, trainer):
        if signum:
            signal.raise_signal(signum)
        if error:
            raise error
        return "done"

    return spawned._launch(function, None, trainer=SimpleNamespace(state=SimpleNamespace(fn=fn)))


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        ("ValueError: no pictures: a folder", ValueError, "no pictures: a folder"),
        (f"{decode.__name__}.DecodeError: a.png: can't be decoded", ValueError, "a.png: can't be decoded"),
        ("MemoryError: std::bad_alloc", MemoryError, "std::bad_alloc"),
        ("ZeroDivisionError: division by zero", RuntimeError, "ZeroDivisionError: division by zero"),
        ("no.such.Error: x", RuntimeError, "Error: x"),
    ],
)
def test_an_error_is_of_the_kind_that_it_was(text, kind, told):
    traceback = f'\n\n-- Process 0 terminated with the following error:\nTraceback\n  File "x"\n{text}\n'
    with pytest.raises(kind) as raised:
        launched(ProcessRaisedException(traceback, 0, 7))
    assert type(raised.value) is kind
    assert str(raised.value) == told


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
    process = multiprocessing.get_context("fork").Process(target=spawned._run, args=(broken_off, None, 0))
    process.start()
    process.join(60)
    assert process.exitcode == 128 + signal.SIGTERM


def take_a_batch(*_):
    next(iter(DataLoader(Hanging(receive_nothing), batch_size=None, num_workers=1)))


def test_a_worker_of_theirs_that_ends_while_it_hands_over_a_batch_is_told_of():
    with pytest.raises(ProcessRaisedException) as caught:
        start_processes(partial(spawned._run, take_a_batch, None), start_method="fork")
    with pytest.raises(RuntimeError) as raised:
        launched(caught.value)
    assert one_line(raised.value).startswith("a process that reads pictures was killed")
