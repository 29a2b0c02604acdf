"""Processes that torchrun, Lightning or a Python program has started make one run, and end together."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from colours import QUICKEST
from processes import Process, left_after, run_script, start, start_script

from finetune.distributed.ranks import PARENT

ONE_EPOCH = "".join(rf"{what}.*\n" for what in ("images: ", "network: ", "training: ", "val has "))
ONE_EPOCH += r"epoch 1/1  train/loss \d.*images/s\n"


def check_one_run(out: str, err: str, folder: Path) -> Path:
    """Make sure that two processes have left one run, each image tested once, and return its folder."""
    assert out.count("run in") == out.count("test/accuracy") == 1
    assert " of 30; 95 % interval " in out
    assert re.fullmatch(ONE_EPOCH, err), err  # by one process, and nothing else
    assert "training: 2 x cpu, " in err
    (run,) = (folder / "runs/fit").iterdir()
    # of 54 images by 16
    assert torch.load(run / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 4
    return run


def test_torchrun_alone_makes_one_run_of_two_processes(colours, tmp_path):
    """On a CPU it used to make two, each with the whole batch, in one folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "finetune", "fit", str(colours), *QUICKEST]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    check_one_run(result.stdout, result.stderr, tmp_path)


PROGRAM = """
import os, sys
from finetune import fit, load
print("once")
options = {"report": False, "trainer.accelerator": "cpu"}
quick = dict(size=28, batch=16, workers=0, weights=None, backbone="small_cnn", precision="32-true")
before = dict(os.environ)
run = fit(sys.argv[1], devices=2, epochs=int(sys.argv[2]), options=options, **quick)
assert before == dict(os.environ)
print(run.path, len(load(run).predict(sys.argv[1] + "/test/red")))
"""


def test_finetune_fit_on_two_devices_needs_no_main_guard(colours, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_script(tmp_path / "program.py", colours, 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = check_one_run(done.stdout, done.stderr, tmp_path)
    lines = done.stdout.splitlines()
    assert lines.count("once") == 1 and f"{run} 10" in lines
    command = json.loads((run / "run.json").read_text())["command"]
    assert command.startswith(f"finetune.fit(folder={str(colours)!r}, epochs=1")


def wait_for_a_checkpoint(process: Process, folder: Path) -> None:
    while not list(folder.rglob("last.ckpt")):
        assert process.poll() is None, process.stderr
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parent = path.read_text().rpartition(") ")[2].split()[1]
            children += [int(path.parent.name)] if int(parent) == pid else []
    return children + [each for child in children for each in descendants(child)]


def wait_for_the_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "they have outlived the program"
        time.sleep(0.1)


def test_a_fit_ends_with_the_program_that_began_it(colours, tmp_path):
    """As when a notebook's kernel is killed."""
    (tmp_path / "program.py").write_text(PROGRAM)
    process = start_script(tmp_path / "program.py", colours, 5000, cwd=tmp_path)
    started: list[int] = []
    try:
        wait_for_a_checkpoint(process, tmp_path)
        started = descendants(process.pid)
        assert len(started) >= 2  # the control: both devices are there
        process.send_signal(signal.SIGKILL)
        wait_for_the_end(started)
    finally:
        for pid in (*started, process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_fit_ends_if_the_program_that_began_it_has_ended_before_it_looked(colours, tmp_path):
    with subprocess.Popen(["true"]) as program:
        pass
    env = {**os.environ, PARENT: str(program.pid)}
    command = [sys.executable, "-m", "finetune", "fit", str(colours), *QUICKEST]
    fit = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=120)
    assert fit.returncode == 1 and not list(tmp_path.rglob("*.ckpt"))


def test_a_killed_rank_ends_the_others_with_one_line(colours, tmp_path):
    """Lightning would kill the first process without a message."""
    words = ["--trainer.max_epochs", 5000, "--devices", 2, "--data.cache_limit_gb", 0]
    process = start("fit", colours, *QUICKEST, *words, cwd=tmp_path)
    try:
        wait_for_a_checkpoint(process, tmp_path)
        (rank,) = descendants(process.pid)
        os.kill(rank, signal.SIGKILL)
        assert process.wait(60) == 1
        assert left_after([process.pid], 20) == []
    finally:
        process.kill()
    lines = [line for line in process.stderr.splitlines() if "error: " in line]
    assert len(lines) == 1 and " ended" in lines[0], process.stderr
    assert "Traceback" not in process.stderr
    assert list(tmp_path.rglob("last.ckpt"))
