"""A plan is a file, from which another process starts: its output, its error and what stops it are handed on.

With the real command: nightly/test_started_processes.py.
"""

import io
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from finetune.api.program_process import needs_processes, run_plan
from finetune.distributed.signals import Interrupted
from finetune.fitting.plan import Plan, read_plan, write_plan
from finetune.runs.facts import Identity
from finetune.settings.fields import ClassSettings
from finetune.settings.layers import replaced
from finetune.settings.schema import FitSettings, TrainerSettings
from finetune.system.messages import WrongUsage

PLAN = Plan(FitSettings(), "finetune fit")
# what `fit --decided FILE` does at its end
ANSWER = """
import os, signal, sys, time
from pathlib import Path

def answer(text, what="run"):
    Path(sys.argv[3]).with_suffix(f".{what}").write_text(text)
"""


def test_a_plan_is_read_as_it_was_written(tmp_path):
    values = {
        "data.root": "photos",
        "data.exclude": ["null", "007"],
        "data.augmentations": None,
        "model.optimizer": ClassSettings("torch.optim.SGD", {"lr": 0.1, "nesterov": True}),
        "model.scheduler": None,
        "model.class_weights": {"a, b": 2.0},
        "trainer.devices": "0,1",
        "trainer.max_epochs": 3,
        "name": "1e3",
    }
    plan = Plan(
        replaced(FitSettings(), values),
        "finetune fit photos",
        Identity("/photos", "finetune.ImageFolderData", "auto", "resnet18", 5),
        run=tmp_path / "runs/fit/version_0",
        changes={"trainer.max_epochs": (2, 3)},
        ranking={"seconds": 1.5},
        notes=("a note",),
    )
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan


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
    settings = TrainerSettings(
        devices=devices, num_nodes=num_nodes, accelerator=accelerator, strategy=strategy
    )
    assert needs_processes(settings) == is_needed
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    # torchrun has started them
    assert not needs_processes(settings)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Let `python -m finetune` be something else."""
    monkeypatch.chdir(tmp_path)  # where `-m` looks first
    # else that of other code of the same second and size would be run
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    def be(code: str) -> None:
        Path("finetune.py").write_text(f"{ANSWER}\n{code}")

    return be


def test_output_is_handed_on_and_an_error_raised(command, capsys):
    command("print('é', flush=True); answer('a b'); print('note', file=sys.stderr)")
    assert run_plan(PLAN) == Path("a b")
    assert capsys.readouterr() == ("é\n", "note\n")
    for code, kind in ((1, ValueError), (2, WrongUsage)):
        command(f"answer('so', 'error'); sys.exit({code})")
        with pytest.raises(kind, match="^so$") as reported:
            run_plan(PLAN)
        assert type(reported.value) is kind
    command("os.kill(os.getpid(), 9)")
    with pytest.raises(RuntimeError, match="code -9"):
        run_plan(PLAN)


def test_it_runs_in_a_thread_which_cannot_handle_signals(command):
    command("answer('a b')")
    handlers = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGHUP)]
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(run_plan, PLAN).result() == Path("a b")
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
            run_plan(PLAN)
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
    command("print('猫…' * 50_000); answer('a b')")
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    shown = {"latin": latin, "broken": Broken(), "none": None}[target]
    monkeypatch.setattr(sys, "stdout", shown)
    assert run_plan(PLAN) == Path("a b")
    if target == "latin":
        latin.seek(0)
        assert latin.read().startswith("??")
