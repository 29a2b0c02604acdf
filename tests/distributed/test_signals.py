"""Ctrl-C, SIGTERM and SIGHUP by real signals: a flag while installed, the previous handlers afterwards."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from finetune.distributed.signals import (
    Interrupted,
    SignalFlag,
    install_stop_at_once,
    is_rank_zero,
)

ALONE = SimpleNamespace(world_size=1)
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
def test_a_signal_sets_the_flag_and_raises_nothing(flag, capfd, signum):
    flag.install()
    assert flag.agreed(ALONE) == 0
    send(signum)
    assert flag.received == flag.agreed(ALONE) == signum
    hint = "Ctrl-C again ends it at once" if signum == signal.SIGINT else "saving"
    assert capfd.readouterr().err == f"\nstopping after this step; {hint}\n"


def test_control_without_it_ctrl_c_is_an_exception(flag):
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    assert flag.received == 0


def test_the_first_signal_counts_and_sigterm_never_ends_at_once(flag, capfd):
    flag.install()
    for _ in range(3):
        send(signal.SIGTERM)
    assert flag.received == signal.SIGTERM
    assert capfd.readouterr().err.count("stopping") == 1
    other = SignalFlag()
    other.install()
    send(signal.SIGINT)
    send(signal.SIGTERM)
    assert other.received == signal.SIGINT


def test_the_previous_handlers_come_back(flag):
    def mine(*_) -> None:
        pass

    signal.signal(signal.SIGTERM, mine)
    before = [signal.getsignal(signum) for signum in SIGNALS]
    flag.install()
    flag.install()  # Lightning puts its own handlers over the first ones: installed again
    assert all(signal.getsignal(signum) not in before for signum in SIGNALS)
    flag.restore()
    assert [signal.getsignal(signum) for signum in SIGNALS] == before
    flag.restore()  # Lightning calls both teardown and on_exception
    assert [signal.getsignal(signum) for signum in SIGNALS] == before
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    flag.install()
    send(signal.SIGTERM)
    assert flag.received == signal.SIGTERM


def test_what_nohup_has_turned_off_stays_off(flag):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    flag.install()
    send(signal.SIGHUP)
    assert flag.received == 0
    install_stop_at_once()
    send(signal.SIGHUP)
    with pytest.raises(Interrupted):
        send(signal.SIGTERM)


def test_a_signal_that_can_not_be_reported_is_not_lost(flag):
    """`finetune fit 2>&1 | tee log`: Ctrl-C also ends `tee`, so the message cannot be printed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writer, 2)
        os.close(reader)
        os.close(writer)
        flag.install()
        try:
            send(signal.SIGINT)
        finally:
            os._exit(flag.received)
    os.close(reader)
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == signal.SIGINT


def test_only_one_device_of_a_machine_speaks(flag, capfd, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    flag.install()
    send(signal.SIGINT)
    assert flag.received == signal.SIGINT and capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_exit_codes_are_those_of_a_shell(signum, code):
    error = Interrupted(signum)
    assert error.exit_code == code
    assert str(error) == f"stopped by {signum.name}; continue with the same command and --resume"


# Signals sent one after the other, and how the process ends; 7 is its own end, reached with the flag alone.
@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ((signal.SIGINT, signal.SIGINT), 130),
        ((signal.SIGTERM, signal.SIGINT), 130),
        ((signal.SIGINT,), 7),
    ],
)
def test_a_second_ctrl_c_ends_the_process_at_once(flag, capfd, signals, code):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        flag.install()
        try:
            for signum in signals:
                send(signum)
        finally:
            os.write(writer, b"cleaned up" if flag.received else b"nothing received")
            os._exit(7)
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    assert os.read(reader, 99) == (b"cleaned up" if code == 7 else b"")
    os.close(reader)
    assert capfd.readouterr().err.count("stopping after this step") == 1


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


def test_outside_the_main_thread_no_handler_is_touched(flag):
    before = [signal.getsignal(signum) for signum in SIGNALS]
    seen = []

    def run() -> None:
        flag.install()
        install_stop_at_once()
        seen.append([signal.getsignal(signum) for signum in SIGNALS])
        flag.restore()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before] == [[signal.getsignal(signum) for signum in SIGNALS]]
    install_stop_at_once()  # control: in the main thread they are
    assert [signal.getsignal(signum) for signum in SIGNALS] != before


def test_a_guest_in_a_process_says_what_a_second_ctrl_c_does(flag):
    ended = []
    flag.end = ended.append
    flag.install()
    for _ in range(2):
        send(signal.SIGINT)
    assert ended == [130]
