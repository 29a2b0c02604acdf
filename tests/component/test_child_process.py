"""A fit on several devices from Python runs the command: its output, its error and what stops it are handed on.

With the real command: nightly/test_started_processes.py.
"""

import io
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from finetune.api.child_process import needs_processes, run_command
from finetune.distributed.signals import Interrupted
from finetune.system.messages import WrongUsage


@pytest.mark.parametrize(
    ("devices", "num_nodes", "accelerator", "strategy", "num_gpus", "is_needed"),
    [
        (1, 1, "auto", "auto", 4, False),
        ("auto", 1, "auto", "auto", 1, False),
        ("auto", 1, "auto", "auto", 4, True),
        ("auto", 1, "cpu", "auto", 4, False),
        (-1, 1, "gpu", "auto", 2, True),
        (2, 1, "cpu", "auto", 0, True),
        ("0,1", 1, "gpu", "auto", 2, True),
        ([1], 1, "gpu", "auto", 2, False),
        (1, 2, "cpu", "auto", 0, True),
        (1, 1, "cpu", "ddp", 0, True),
    ],
)
def test_processes_are_needed_where_lightning_would_start_some(
    monkeypatch, devices, num_nodes, accelerator, strategy, num_gpus, is_needed
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert needs_processes(devices, num_nodes, accelerator, strategy) == is_needed
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    # torchrun has started them
    assert not needs_processes(devices, num_nodes, accelerator, strategy)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Let `python -m finetune` be something else."""
    monkeypatch.chdir(tmp_path)  # where `-m` looks first
    # else that of other code of the same second and size would be run
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    def be(code: str) -> None:
        Path("finetune.py").write_text(f"import os, signal, sys, time\n{code}")

    return be


def test_output_is_handed_on_and_an_error_raised(command, capsys):
    command("print('é', flush=True); print('run in a b'); print('note', file=sys.stderr)")
    assert run_command(["fit"]) == Path("a b")
    assert capsys.readouterr() == ("é\nrun in a b\n", "note\n")
    for code, kind in ((1, ValueError), (2, WrongUsage)):
        command(f"print('finetune: error: so', file=sys.stderr); sys.exit({code})")
        with pytest.raises(kind, match="^so$") as reported:
            run_command(["fit"])
        assert type(reported.value) is kind
    command("os.kill(os.getpid(), 9)")
    with pytest.raises(RuntimeError, match="code -9"):
        run_command(["fit"])


def test_it_runs_in_a_thread_which_cannot_handle_signals(command):
    command("print('run in a b')")
    handlers = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGHUP)]
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(run_command, ["fit"]).result() == Path("a b")
    assert [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGHUP)] == handlers


@pytest.mark.parametrize(
    ("signum", "times", "kind"),
    [
        ("SIGINT", 1, KeyboardInterrupt),
        ("SIGINT", 2, KeyboardInterrupt),
        ("SIGTERM", 1, Interrupted),
    ],
)
def test_a_signal_is_handed_on_and_the_command_waited_for(command, capsys, signum, times, kind):
    command(
        "heard = []\n"
        f"signal.signal(signal.{signum}, lambda *_: heard.append(1))\n"
        "time.sleep(0.3)\n"  # until it waits
        f"os.kill(os.getppid(), signal.{signum})\n"
        "while not heard: time.sleep(0.01)\n"
        f"if {times} == 2: os.kill(os.getppid(), signal.{signum})\n"
        f"while len(heard) < {times}: time.sleep(0.01)\n"
        "print('saved' if len(heard) == 1 else 'at once', flush=True)\n"
        f"sys.exit(128 + signal.{signum})\n"
    )
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(kind):
            run_command(["fit"])
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().out == ("at once\n" if times == 2 else "saved\n")


class Broken(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


@pytest.mark.parametrize("target", ["latin", "broken", "none"])
def test_output_that_can_not_be_shown_keeps_nobody_from_the_run(command, monkeypatch, target):
    """Without a reader, the child would block on a full pipe."""
    command("print('猫…' * 50_000); print('run in a b')")
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    shown = {"latin": latin, "broken": Broken(), "none": None}[target]
    monkeypatch.setattr(sys, "stdout", shown)
    assert run_command(["fit"]) == Path("a b")
    if target == "latin":
        latin.seek(0)
        assert latin.read().startswith("??")
