"""docs/slurm.sh: a batch script that continues a run after the time limit of SLURM."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from paths import ROOT

from finetune.settings.layers import split_line

SCRIPT = ROOT / "docs/slurm.sh"


def submit(folder: Path, *arguments: str, **variables: str) -> tuple[int, list[str], list[str]]:
    """Run the script as SLURM would; return its exit code and what it called srun and scontrol with."""
    for name, code in (("srun", "${SRUN_CODE:-0}"), ("scontrol", "0")):
        program = folder / name
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{program}.called"\nexit {code}\n')
        program.chmod(0o755)
    job = {"JOB_ID": "7", "JOB_NAME": "finetune", "NNODES": "2", "NTASKS_PER_NODE": "4"}
    job["CPUS_PER_TASK"] = "8"
    environment = {**os.environ, **{f"SLURM_{name}": value for name, value in job.items()}}
    environment["PATH"] = f"{folder}:{os.environ['PATH']}"
    ran = subprocess.run(["bash", SCRIPT, *arguments], env={**environment, **variables}, timeout=20)
    called = [folder / f"{name}.called" for name in ("srun", "scontrol")]
    srun, scontrol = [path.read_text().splitlines() if path.exists() else [] for path in called]
    return ran.returncode, srun, scontrol


def test_slurm_starts_a_run_of_the_job(tmp_path):
    code, srun, scontrol = submit(tmp_path, "--config", "hotdog.yaml", "--data.root", "a b")
    assert (code, scontrol) == (0, [])
    assert srun[:3] == ["--cpus-per-task=8", "finetune", "fit"]
    line = split_line("fit", srun[3:])
    assert line.configs == ["hotdog.yaml"]
    assert line.flags == {
        "resume": "true",
        "trainer.default_root_dir": "runs/finetune-7",
        "trainer.num_nodes": "2",
        "trainer.devices": "4",
        "data.num_workers": "8",
        "data.root": "a b",
    }


@pytest.mark.parametrize(
    ("code", "restarts", "is_requeued"),
    [("143", "0", True), ("143", "20", False), ("1", "0", False)],
)
def test_slurm_requeues_a_job_that_was_stopped_and_saved(tmp_path, code, restarts, is_requeued):
    returned, _, scontrol = submit(tmp_path, SRUN_CODE=code, SLURM_RESTART_COUNT=restarts)
    assert str(returned) == code
    assert scontrol == (["requeue", "Incomplete", "7"] if is_requeued else [])


def test_slurm_options():
    head, _, body = SCRIPT.read_text("utf-8").partition("\n\n")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", head, re.M))
    assert options["gpus-per-node"] == options["ntasks-per-node"], "Lightning: a task for each GPU"
    assert options["signal"].startswith("TERM@") and options["open-mode"] == "append"
    assert "requeue" in options and "#SBATCH" not in body, "sbatch stops reading at a command"
