"""Ctrl-C, SIGTERM, a closed terminal, and whatever else ends a run: all its processes end soon, with one line and
the right exit code. That it resumes: test_resume.py.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from colours import QUICKEST
from ended_commands import Scenario, ending, faults
from processes import left_after, run_script, start
from promise import control, promise

from finetune.cli import main
from finetune.runs.metrics_csv import read_metrics

# Each failure, phase, number of workers, way of starting and screen, in the order of `Scenario`
ENDS = [
    "sigint-train-1-one-terminal",
    "sigint-predict-1-torchrun-terminal",
    "sigterm-decode-0-torchrun-file",
    "sigterm-validate-1-one-file",
    "sighup-train-3-torchrun-terminal",
    "sighup-only_validate-1-lightning-terminal",
    "truncated-only_test-3-one-file",
    "exception-test-1-lightning-file",
    "memory-validate-3-one-file",
    "idle_killed-train-3-one-file",
    "busy_killed-train-1-lightning-terminal",
    "main_killed-train-1-lightning-file",
]


@promise("stop")
@pytest.mark.parametrize("devices", [1, 2])
def test_ctrl_c_stops_all_processes_after_the_step_and_saves(colours, tmp_path, devices):
    """With the last step that was trained, also of two devices."""
    fit = [
        "fit",
        colours,
        *QUICKEST,
        "--trainer.max_epochs",
        5000,
        "--trainer.log_every_n_steps",
        1,
    ]
    fit += ["--model.scheduler", "finetune.WarmupCosine"]  # whose rates are logged with each step
    process = start(*fit, "--devices", devices, "--data.cache_limit_gb", 0, cwd=tmp_path)
    try:
        while not list(tmp_path.rglob("last.ckpt")):
            assert process.poll() is None, process.stderr
            time.sleep(0.02)
        started = time.monotonic()
        process.send_signal_to_all(signal.SIGINT)  # as a terminal does
        assert process.wait(30) == 130
        assert left_after([process.pid], 20 - (time.monotonic() - started)) == []
        assert time.monotonic() - started < 20
    finally:
        process.kill()
    usual = ("images: ", "network: ", "training: ", "epoch ", "val has ")
    assert [
        line for line in process.stderr.splitlines() if line and not line.startswith(usual)
    ] == [
        "stopping after this step; Ctrl-C again ends it at once",
        "stopped by SIGINT; continue with the same command and --resume",
    ]
    (last,), (steps,) = tmp_path.rglob("last.ckpt"), tmp_path.rglob("steps.csv")
    # The last step that was trained, not that of an epoch's end before the signal.
    assert (
        torch.load(last, weights_only=True)["global_step"]
        == int(read_metrics(steps)[-1]["step"]) + 1
    )


@promise("stop")
@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_every_process_ends_in_time_with_one_line_and_the_right_code(finished, tmp_path, name):
    scenario = Scenario(*name.split("-"))
    end = ending(scenario, tmp_path, finished / "checkpoints/best.ckpt")
    assert faults(scenario, end) == [], end.output


@control("stop")
@pytest.mark.slow
def test_a_worker_that_ignores_the_first_sigterm_is_caught(finished, tmp_path):
    scenario = Scenario("mistake", "train", "1", "one", "file")
    end = ending(scenario, tmp_path, finished / "checkpoints/best.ckpt", deadline=5.0)
    assert end.codes == [None] and end.left and end.seconds >= 5
    assert "the network fails" in end.output  # it has said so, and stays


@pytest.mark.slow
def test_ctrl_c_ends_interpreters_in_one_line(colours, tmp_path):
    """As above of forked processes; test_started_processes.py has a fit of two that ends by itself.

    Ranks of another job, which a shell may have, neither silence the run nor let it wait for other processes: Lightning
    reads RANK when it is imported, which is why these are new interpreters.
    """
    arguments = [
        str(a) for a in ("fit", "--data.root", colours, *QUICKEST, "--trainer.max_epochs", 500)
    ]
    # which may be reported in a line
    arguments += ["--trainer.devices", "2", "--data.cache_limit_gb", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "finetune", *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": "1", "LOCAL_RANK": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 240
        while not list(tmp_path.rglob("last.ckpt")) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process
        _, err = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    reported = ("images: ", "network: ", "training: ", "epoch ", "val has ")
    lines = [line for line in err.splitlines() if line and not line.startswith(reported)]
    assert lines == [
        "stopping after this step; Ctrl-C again ends it at once",
        "stopped by SIGINT; continue with the same command and --resume",
    ]


@pytest.mark.slow
def test_ctrl_c_outside_training_ends_at_once(finished, colours, tmp_path):
    """During a prediction, when there is nothing to save."""
    many = tmp_path / "list.txt"
    many.write_text("\n".join(str(path) for path in colours.rglob("*.png")) * 200)
    checkpoint = finished / "checkpoints/best.ckpt"
    arguments = [
        "predict",
        "--ckpt_path",
        str(checkpoint),
        "--data.predict",
        str(many),
        "--output",
        "out.csv",
    ]
    process = start(*arguments, "--trainer.accelerator", "cpu", cwd=tmp_path)
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".out.csv.*.part0")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        process.kill()
    assert process.returncode == 130
    num = len(many.read_text().splitlines())
    assert process.stderr == f"predicting {num:,} images\nstopped by SIGINT\n"
    assert list(tmp_path.glob("*out.csv*")) + list(tmp_path.glob(".out.csv*")) == []


def test_sigterm_ends_it_from_the_first_moment(monkeypatch):
    """By default, Linux ignores SIGTERM for the first process of a container."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(
        "finetune.cli.run", lambda *_: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(9)
    )
    with pytest.raises(SystemExit) as caught:
        main(["fit"])
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("module", "signum"),
    [
        ("numpy.linalg", signal.SIGINT),
        ("numpy.dtypes", signal.SIGTERM),
        ("torch", signal.SIGINT),
        ("torch", signal.SIGHUP),
    ],
)
def test_a_signal_while_libraries_are_imported_ends_it(tmp_path, signum, module):
    """If an exception is raised during their import, numpy and torch swallow it or break."""
    (tmp_path / "sitecustomize.py").write_text(f"""
import os, sys
class Finder:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), {int(signum)})
sys.meta_path.insert(0, Finder())
""")
    # Another sitecustomize may stand in the way of this one.
    code = f"exec(open({str(tmp_path / 'sitecustomize.py')!r}).read()); from finetune.cli import main; main()"
    command = [sys.executable, "-c", code, "fit", "--data.root", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (128 + signum, "")


# A process of a group of one; NCCL, which needs GPUs, is gloo under its name, and leaving it takes for ever.
FAILING = """
import sys, time
import torch.distributed as dist
from finetune import cli
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
dist.get_backend = lambda: sys.argv[2]
dist.destroy_process_group = lambda: print("left", flush=True) or time.sleep(600 if sys.argv[2] == "nccl" else 0)
def run(*_):
    raise {"line": OSError("no image"), "traceback": KeyError("ours"), "signal": SystemExit(143)}[sys.argv[3]]
cli.run = run
cli.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(
    ("failure", "code", "reported"),
    [
        ("line", 1, "finetune: error: no image\n"),
        ("traceback", 1, "open an issue with the lines above\n"),
        ("signal", 143, ""),
    ],
)
def test_a_failing_process_waits_for_no_other_at_its_end(
    tmp_path, backend, failure, code, reported
):
    (tmp_path / "failing.py").write_text(FAILING)
    done = run_script(tmp_path / "failing.py", tmp_path / "meeting", backend, failure, cwd=tmp_path)
    assert done.returncode == code and done.stderr.endswith(reported), done.stderr
    assert done.stdout == ("left\n" if backend == "gloo" else "")
