"""The number of processes: what torchrun or srun started, or the argument."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from colours import QUICKEST

from finetune.distributed import launch
from finetune.distributed.launch import check_num_processes, cluster_environment, num_processes
from finetune.system.messages import WrongUsage


def launched(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def by_torchrun(monkeypatch: pytest.MonkeyPatch, total: int, here: int) -> None:
    launched(monkeypatch, TORCHELASTIC_RUN_ID="a", WORLD_SIZE=total, LOCAL_WORLD_SIZE=here)


def by_srun(monkeypatch: pytest.MonkeyPatch, total: int, nodes: int, name: str = "job") -> None:
    tasks = {"SLURM_NTASKS": total, "SLURM_STEP_NUM_TASKS": total, "SLURM_STEP_NUM_NODES": nodes}
    launched(monkeypatch, SLURM_JOB_NAME=name, **tasks)


@pytest.mark.parametrize("start", [by_torchrun, by_srun])
def test_what_a_launcher_started_is_taken(monkeypatch, start):
    by_nodes = {by_torchrun: ((2, 2), (4, 2)), by_srun: ((2, 1), (4, 2))}[start]
    start(monkeypatch, *by_nodes[0])
    assert num_processes("auto", 1) == (2, 1)
    assert num_processes(2, 1) == (2, 1)
    assert num_processes([0, 1], 1) == ([0, 1], 1)
    assert num_processes("-1", 1) == ("-1", 1)
    start(monkeypatch, *by_nodes[1])
    assert num_processes("auto", 1) == (2, 2)
    assert num_processes("2", 2) == ("2", 2)


@pytest.mark.parametrize(
    ("devices", "num_nodes"), [(1, 1), (4, 1), ("0,1,2", 1), ([0], 2), ("auto", 3)]
)
def test_what_contradicts_the_launcher_is_refused(monkeypatch, devices, num_nodes):
    by_torchrun(monkeypatch, 4, 2)
    with pytest.raises(
        ValueError,
        match="torchrun started 4 processes, 2 on each of 2 machines, but .*omit both",
    ):
        num_processes(devices, num_nodes)


def test_machines_with_unlike_numbers_are_refused(monkeypatch):
    by_torchrun(monkeypatch, 3, 2)
    with pytest.raises(
        ValueError, match="torchrun started 3 processes, with different numbers on the machines"
    ):
        num_processes("auto", 1)


def test_a_cpu_gets_no_more_processes_than_it_can_run(monkeypatch):
    monkeypatch.setattr(launch, "num_cores", lambda: 2)
    for devices in (17, "5000"):
        with pytest.raises(WrongUsage, match=rf"trainer.devices {devices}: at most 16 processes"):
            check_num_processes(devices, "cpu")
    for devices in (16, "16", "auto", -1, "0,1", [0, 1]):  # the control
        check_num_processes(devices, "cpu")
    check_num_processes(17, "cuda")


def test_what_lightning_misses_of_srun_is_reported_in_a_line(monkeypatch):
    by_srun(monkeypatch, 2, 1, "fit")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    assert len(cluster_environment()) == 1
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    with pytest.raises(WrongUsage, match="--ntasks-per-node"):
        cluster_environment()


def test_srun_that_lightning_would_overlook_is_refused(monkeypatch):
    by_srun(monkeypatch, 2, 1, "bash")
    with pytest.raises(
        ValueError, match="srun started 2 processes, but Lightning ignores jobs named 'bash'"
    ):
        num_processes("auto", 1)


def test_without_a_launcher_lightning_starts_what_is_given(monkeypatch):
    assert num_processes("auto", 1) == ("auto", 1)
    assert num_processes(2, 3) == (2, 3)
    launched(monkeypatch, SLURM_NTASKS=4)  # a batch script without srun is one process
    assert num_processes("auto", 1) == ("auto", 1)


@pytest.mark.slow
def test_torchrun_alone_makes_one_run_of_two_processes(colours, tmp_path: Path):
    """On a CPU it used to make two, each with the whole batch, in one folder."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "finetune",
    ]
    command += ["fit", "--data.root", str(colours), *QUICKEST]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("run in") == 1
    assert result.stdout.count("test/accuracy") == 1
    assert " of 30; 95 % interval " in result.stdout  # each image counts once
    # by one process, and nothing else
    reported = "".join(
        rf"{what}.*\n" for what in ("images: ", "network: ", "training: ", "val has ")
    )
    assert re.fullmatch(rf"{reported}epoch 1/1  train/loss \d.*images/s\n", result.stderr)
    assert "training: 2 x cpu, " in result.stderr
    (run,) = (tmp_path / "runs/fit").iterdir()
    # of 54 images by 16
    assert torch.load(run / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 4


def test_a_shell_that_srun_began_starts_what_it_likes(monkeypatch):
    by_srun(monkeypatch, 1, 1, name="bash")
    assert num_processes(2, 1) == (2, 1)
    assert num_processes("auto", 1) == ("auto", 1)
