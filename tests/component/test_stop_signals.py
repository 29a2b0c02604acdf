"""Ctrl-C, SIGTERM and SIGHUP by real signals: a flag while installed, the previous handlers afterwards.

That a command saves and ends: test_ends.py.
"""

import os
import signal
import time

import pytest

from finetune.distributed.signals import (
    Interrupted,
    SignalFlag,
    install_stop_at_once,
    is_rank_zero,
)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def flag():
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    flag = SignalFlag()
    yield flag
    for signum, handler in before.items():
        signal.signal(signum, handler)


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)
    time.sleep(0)  # Python runs handlers between two instructions of the main thread


@pytest.mark.parametrize("signum", SIGNALS)
def test_the_first_signal_sets_the_flag_with_one_line(flag, capfd, monkeypatch, signum):
    flag.install()
    send(signum)
    assert flag.received == signum
    send(signal.SIGTERM)  # never ends it at once
    assert flag.received == signum
    error = capfd.readouterr().err
    assert error.count("stopping") == 1 and ("Ctrl-C again" in error) == (signum == signal.SIGINT)
    monkeypatch.setenv("LOCAL_RANK", "1")  # only one process of a machine speaks
    other = SignalFlag()
    other.install()
    send(signum)
    assert other.received == signum and capfd.readouterr().err == ""


def test_the_previous_handlers_come_back_however_often_it_is_installed(flag):
    signal.signal(signal.SIGTERM, lambda *_: None)
    before = [signal.getsignal(signum) for signum in SIGNALS]
    for _ in range(2):  # Lightning puts its own handlers over the first ones
        flag.install()
    assert all(signal.getsignal(signum) not in before for signum in SIGNALS)
    for _ in range(2):  # Lightning calls both teardown and on_exception
        flag.restore()
        assert [signal.getsignal(signum) for signum in SIGNALS] == before
    with pytest.raises(KeyboardInterrupt):  # the control: without it Ctrl-C is an exception
        send(signal.SIGINT)
    assert flag.received == 0


def test_sighup_that_nohup_has_turned_off_stays_off(flag):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    flag.install()
    send(signal.SIGHUP)
    assert flag.received == 0
    install_stop_at_once()
    send(signal.SIGHUP)
    with pytest.raises(Interrupted) as stopped:
        send(signal.SIGTERM)
    assert stopped.value.exit_code == 143


# Signals sent one after the other, and how the process ends; 7 is its own end, reached with the flag alone.
@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ((signal.SIGINT, signal.SIGINT), 130),
        ((signal.SIGTERM, signal.SIGINT), 130),
        ((signal.SIGINT,), 7),
    ],
)
@pytest.mark.parametrize("has_terminal", [True, False])  # Ctrl-C ends `tee` of `2>&1 | tee`, too
def test_a_second_ctrl_c_ends_the_process_at_once(flag, signals, code, has_terminal):
    unread, closed = os.pipe()
    reader, writer = os.pipe()
    os.close(unread)
    pid = os.fork()
    if pid == 0:
        if not has_terminal:
            os.dup2(closed, 2)
        flag.install()
        try:
            for signum in signals:
                send(signum)
        finally:
            os.write(writer, b"cleaned up" if flag.received else b"nothing received")
            os._exit(7)
    os.close(writer)
    os.close(closed)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    assert os.read(reader, 99) == (b"cleaned up" if code == 7 else b"")
    os.close(reader)


@pytest.mark.parametrize(
    ("variables", "is_first"),
    [
        ({}, True),
        ({"LOCAL_RANK": "1"}, False),  # started by Lightning
        ({"RANK": "2", "LOCAL_RANK": "0"}, False),  # by torchrun, the first of the second machine
        ({"SLURM_PROCID": "0"}, True),
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "1"}, False),
        ({"SLURM_PROCID": "0", "LOCAL_RANK": "1"}, False),  # by Lightning, in a script of sbatch's
    ],
)
def test_one_process_speaks_for_all(monkeypatch, variables, is_first):
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_rank_zero() == is_first
