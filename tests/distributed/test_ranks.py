"""The ranks of a run on one machine: none outlives rank 0, and rank 0 outlives none of them."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from pytorch_lightning.plugins.environments import LightningEnvironment, SLURMEnvironment
from pytorch_lightning.strategies.launchers import subprocess_script

from finetune.distributed import ranks

# The variables of a process, and whether it ends with the one that started it.
STARTED = [
    ({"FINETUNE_FIRST_PROCESS": os.getpid, "LOCAL_RANK": "1"}, True),  # Lightning started it
    ({"LOCAL_RANK": "1"}, False),  # somebody else, who may go away
    ({"FINETUNE_FIRST_PROCESS": os.getpid, "LOCAL_RANK": "0"}, False),
    ({"FINETUNE_PARENT_PROCESS": os.getpid}, True),  # a program, with which the complete fit ends
    # another program, whose variable was handed on
    ({"FINETUNE_PARENT_PROCESS": os.getppid}, False),
]


def start_two(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, Any], ends: bool
) -> tuple[int, int]:
    """Start a process that starts another one; return the pid of the first and the output of the second."""
    read, write = os.pipe()
    first = os.fork()
    if first == 0:
        for name, value in variables.items():
            monkeypatch.setenv(name, value if isinstance(value, str) else str(value()))
        if os.fork() == 0:
            ranks.end_with_rank_zero()
            os.write(write, b"x")
            time.sleep(4 if ends else 2)
            os.write(write, b"y")  # still there
            os._exit(0)
        time.sleep(60)
    os.close(write)
    return first, read


@pytest.mark.slow
def test_a_process_ends_with_the_one_that_started_it(monkeypatch):
    started = [start_two(monkeypatch, *case) for case in STARTED]
    for first, read in started:
        assert os.read(read, 1) == b"x"
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
    for (variables, ends), (_, read) in zip(STARTED, started, strict=True):
        assert os.read(read, 1) == (b"" if ends else b"y"), variables
        os.close(read)


def observe(monkeypatch: pytest.MonkeyPatch, codes: tuple[int, int]) -> tuple[int, int]:
    """Start a process that observes others, which end with these codes; return its pid and its output."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(write, 2)
        monkeypatch.setattr(ranks, "_GRACE", 0.5)
        monkeypatch.setattr(ranks, "_TIME_TO_STOP", 0.5)
        ranks.ending.clear()  # as `take_over` does
        ends = [
            f"import os; os.kill(os.getpid(), {-code})" if code < 0 else f"raise SystemExit({code})"
            for code in codes
        ]
        started = time.monotonic()
        ranks._observe([subprocess.Popen([sys.executable, "-Sc", end]) for end in ends])
        while time.monotonic() < started + 3:
            time.sleep(0.1)
        os._exit(7)
    os.close(write)
    return pid, read


@pytest.mark.slow
def test_the_first_process_ends_some_seconds_after_one_that_fails(monkeypatch):
    """It has these seconds to notice the failure itself; Lightning kills it without a message."""
    expected = {(0, 3): 1, (0, -9): 1, (0, 130): 130, (0, 0): 7}
    started = {codes: observe(monkeypatch, codes) for codes in expected}
    for codes, (pid, read) in started.items():
        with open(read) as output:
            reported = output.read()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == expected[codes]
        what = f"finetune: error: process 2 ended with code {codes[1]}, and this one cannot continue without it\n"
        stopped = (
            "finetune: error: process 2 was stopped, and this one would wait for it for ever\n"
        )
        assert reported == {0: "", 130: stopped}.get(codes[1], what)


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "expected"), [(0.5, 7), (60.0, 1)])
def test_the_first_process_may_end_with_an_error_of_its_own(monkeypatch, seconds, expected):
    """After its error it has a limited time to write deferred checkpoints."""
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        monkeypatch.setattr(ranks, "_GRACE", 0.2)
        monkeypatch.setattr(ranks, "_TIME_TO_STOP", 2.5)
        ranks.ending.set()
        ranks._observe([subprocess.Popen([sys.executable, "-Sc", "raise SystemExit(1)"])])
        time.sleep(seconds)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == expected


@pytest.mark.parametrize(
    "environment", [LightningEnvironment(), SLURMEnvironment(auto_requeue=False)]
)
def test_lightning_installs_no_handlers_and_no_observer(monkeypatch, environment):
    monkeypatch.setenv("FINETUNE_FIRST_PROCESS", "")
    monkeypatch.setattr(subprocess_script, "_launch_process_observer", None)
    launcher = subprocess_script._SubprocessScriptLauncher(LightningEnvironment(), 2, 1)
    signals = SimpleNamespace(register_signal_handlers=print)
    connector = SimpleNamespace(cluster_environment=environment)
    ranks.take_over(
        SimpleNamespace(
            strategy=SimpleNamespace(launcher=launcher),
            _accelerator_connector=connector,
            _signal_connector=signals,
        )
    )
    assert signals.register_signal_handlers() is None  # done, and nothing done
    assert subprocess_script._launch_process_observer is ranks._observe
    assert os.environ["FINETUNE_FIRST_PROCESS"] == str(os.getpid())


def test_requeueing_that_was_asked_for_stays(monkeypatch):
    signals = SimpleNamespace(register_signal_handlers=print)
    connector = SimpleNamespace(cluster_environment=SLURMEnvironment(auto_requeue=True))
    strategy = SimpleNamespace(launcher=None)
    ranks.take_over(
        SimpleNamespace(
            strategy=strategy, _accelerator_connector=connector, _signal_connector=signals
        )
    )
    assert signals.register_signal_handlers is print
