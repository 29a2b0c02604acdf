"""A fit on several devices from a Python program needs no main guard, runs the program once, and ends once."""

import io
import json
import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import run_script, start_script

from finetune.api import child_process
from finetune.api.child_process import needs_processes, run_command
from finetune.distributed.signals import Interrupted
from finetune.system.messages import WrongUsage


@pytest.mark.parametrize(
    ("devices", "num_nodes", "accelerator", "strategy", "num_gpus", "is_needed"),
    [
        (1, 1, "auto", "auto", 0, False),
        ("auto", 1, "auto", "auto", 0, False),
        ("auto", 1, "auto", "auto", 1, False),
        ("auto", 1, "auto", "auto", 4, True),
        ("auto", 1, "cpu", "auto", 4, False),
        (-1, 1, "gpu", "auto", 2, True),
        (2, 1, "cpu", "auto", 0, True),
        ("0,1", 1, "gpu", "auto", 2, True),
        ([1], 1, "gpu", "auto", 2, False),
        (1, 2, "cpu", "auto", 0, True),
        (1, 1, "cpu", "ddp", 0, True),
        ("two", 1, "cpu", "auto", 0, False),
    ],
)
def test_processes_are_needed_where_lightning_would_start_some(
    monkeypatch, devices, num_nodes, accelerator, strategy, num_gpus, is_needed
):
    monkeypatch.setattr(child_process.cuda, "device_count", lambda: num_gpus)
    assert needs_processes(devices, num_nodes, accelerator, strategy) == is_needed
    for name, value in {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
    }.items():
        monkeypatch.setenv(name, value)
    # torchrun has started them
    assert not needs_processes(devices, num_nodes, accelerator, strategy)


_PROGRAM = """
import os, sys
from finetune import fit, load
print("once")
options = {"report": False, "trainer.accelerator": "cpu"}
quick = dict(size=28, batch=16, workers=0, weights=None, backbone="small_cnn", precision="32-true")
before = dict(os.environ)
run = fit(sys.argv[1], devices=2, epochs=1, options=options, **quick)
assert before == dict(os.environ)
print(run.path, len(load(run).predict(sys.argv[1] + "/test/red")))
"""


@pytest.mark.slow
def test_a_script_without_a_guard_trains_on_two_devices(colours, tmp_path):
    (tmp_path / "program.py").write_text(_PROGRAM)
    done = run_script(tmp_path / "program.py", colours, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("once") == 1 and "training: 2 x cpu" in done.stderr
    # one run and one result, in which each image counts once
    (run,) = (tmp_path / "runs/fit").iterdir()
    assert run.name == "version_0" and done.stdout.count("test/accuracy") == 1
    assert " of 30; 95 % interval " in done.stdout
    # by one process, and nothing else
    reported = "".join(
        rf"{what}.*\n" for what in ("images: ", "network: ", "training: ", "val has ")
    )
    assert re.fullmatch(rf"{reported}epoch 1/1  train/loss \d.*images/s\n", done.stderr), (
        done.stderr
    )
    assert f"{run} 10" in lines and f"run in {run.relative_to(tmp_path)}" in lines
    assert json.loads((run / "about.json").read_text())["command"].startswith(
        f"finetune fit {colours} --epochs 1"
    )


def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let `python -m finetune` be something else."""
    (tmp_path / "finetune.py").write_text(f"import os, signal, sys, time\n{code}")
    monkeypatch.chdir(tmp_path)  # where `-m` looks first
    # else that of other code of the same second and size would be run
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")


def test_what_it_reports_is_handed_on_and_what_ends_it_raised(tmp_path, monkeypatch, capsys):
    fake(
        tmp_path,
        monkeypatch,
        "print('é', flush=True); print('run in a b'); print('note', file=sys.stderr)",
    )
    assert run_command(["fit"]) == Path("a b")
    assert capsys.readouterr() == ("é\nrun in a b\n", "note\n")
    for code, kind in ((1, ValueError), (2, WrongUsage)):
        fake(
            tmp_path,
            monkeypatch,
            f"print('finetune: error: so', file=sys.stderr); sys.exit({code})",
        )
        with pytest.raises(kind, match="^so$") as reported:
            run_command(["fit"])
        assert type(reported.value) is kind
    fake(tmp_path, monkeypatch, "os.kill(os.getpid(), 9)")
    with pytest.raises(RuntimeError, match="ended with code -9"):
        run_command(["fit"])


def test_it_runs_in_a_thread_which_cannot_handle_signals(tmp_path, monkeypatch):
    fake(tmp_path, monkeypatch, "print('run in a b')")
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
def test_what_stops_this_process_is_handed_on_and_waited_for(
    tmp_path, monkeypatch, capsys, signum, times, kind
):
    fake(
        tmp_path,
        monkeypatch,
        "heard = []\n"
        f"signal.signal(signal.{signum}, lambda *_: heard.append(1))\n"
        "time.sleep(0.3)\n"  # until it waits
        f"os.kill(os.getppid(), signal.{signum})\n"
        "while not heard: time.sleep(0.01)\n"
        f"if {times} == 2: os.kill(os.getppid(), signal.{signum})\n"
        f"while len(heard) < {times}: time.sleep(0.01)\n"
        "print('saved' if len(heard) == 1 else 'at once', flush=True)\n"
        f"sys.exit(128 + signal.{signum})\n",
    )
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(kind):
            run_command(["fit"])
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().out == ("at once\n" if times == 2 else "saved\n")


@pytest.mark.slow
def test_it_ends_with_the_program(tmp_path):
    """As when a notebook's kernel is killed."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom finetune.api import child_process\n"
        "child_process.sys.executable = sys.argv[1]\nchild_process.run_command([])\n"
    )
    stand_in = tmp_path / "python"
    stand_in.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'import os, time\n"
        "from finetune.distributed.ranks import end_with_rank_zero\nend_with_rank_zero()\n"
        f'open("{tmp_path}/pid", "w").write(str(os.getpid()))\ntime.sleep(60)\'\n'
    )
    stand_in.chmod(0o755)
    process = start_script(program, stand_in, cwd=tmp_path)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert process.poll() is None, process.stderr
        time.sleep(0.05)
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, 0)  # control: it is there
    process.send_signal(signal.SIGKILL)
    process.wait()
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    else:
        os.kill(pid, signal.SIGKILL)
        pytest.fail("it has outlived the program")


class Broken(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


@pytest.mark.parametrize("target", ["latin", "broken", "none"])
def test_what_can_not_be_shown_keeps_nobody_from_the_run(tmp_path, monkeypatch, target):
    """Without a reader, the child would block on a full pipe."""
    fake(tmp_path, monkeypatch, "print('猫…' * 50_000); print('run in a b')")
    shown = {
        "latin": io.TextIOWrapper(io.BytesIO(), encoding="latin-1"),
        "broken": Broken(),
        "none": None,
    }[target]
    monkeypatch.setattr(sys, "stdout", shown)
    assert run_command(["fit"]) == Path("a b")
    if target == "latin":
        shown.seek(0)
        assert shown.read().startswith("??")
