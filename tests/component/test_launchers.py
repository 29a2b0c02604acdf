"""The number of processes: what torchrun or srun has started, or --devices. In real processes: nightly/."""

import pytest

from finetune.distributed.launch import cluster_environment, num_processes
from finetune.system.messages import WrongUsage


def launched(monkeypatch: pytest.MonkeyPatch, launcher: str, total: int, machines: int) -> None:
    """Set the variables of a launcher that has started so many processes on so many machines."""
    variables = {
        "torchrun": {
            "TORCHELASTIC_RUN_ID": "a",
            "WORLD_SIZE": total,
            "LOCAL_WORLD_SIZE": -(-total // machines),
        },
        "srun": {
            "SLURM_JOB_NAME": "job",
            "SLURM_NTASKS": total,
            "SLURM_STEP_NUM_TASKS": total,
            "SLURM_STEP_NUM_NODES": machines,
        },
        "sbatch": {"SLURM_JOB_NAME": "job", "SLURM_NTASKS": total},
        "none": {},
    }
    for name, value in variables[launcher].items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(
    ("launcher", "total", "machines", "given", "expected"),
    [
        ("torchrun", 2, 1, ("auto", 1), (2, 1)),
        ("torchrun", 2, 1, (2, 1), (2, 1)),
        ("torchrun", 2, 1, ([0, 1], 1), ([0, 1], 1)),
        ("torchrun", 2, 1, ("-1", 1), (2, 1)),
        ("torchrun", 4, 2, ("auto", 1), (2, 2)),
        ("torchrun", 4, 2, ("2", 2), ("2", 2)),
        ("srun", 2, 1, ("auto", 1), (2, 1)),
        ("srun", 4, 2, ("2", 2), ("2", 2)),
        ("sbatch", 4, 1, ("auto", 1), ("auto", 1)),  # without srun it is one process
        ("none", 1, 1, ("auto", 1), ("auto", 1)),
        ("none", 1, 1, (2, 3), (2, 3)),
    ],
)
def test_devices_are_those_that_a_launcher_has_started(
    monkeypatch, launcher, total, machines, given, expected
):
    launched(monkeypatch, launcher, total, machines)
    assert num_processes(*given) == expected


@pytest.mark.parametrize(
    ("launcher", "total", "given", "words"),
    [
        *(
            (launcher, 4, given, "omit both")
            for launcher in ("torchrun", "srun")
            for given in [(1, 1), (4, 1), ("0,1,2", 1), ([0], 2), (1, 4), ("auto", 3)]
        ),
        ("torchrun", 3, ("auto", 1), "different numbers"),
        ("srun", 3, ("auto", 1), "different numbers"),
    ],
)
def test_devices_that_contradict_a_launcher_are_refused(monkeypatch, launcher, total, given, words):
    launched(monkeypatch, launcher, total, 2)
    with pytest.raises(WrongUsage, match=f"{launcher} started {total} processes.*{words}"):
        num_processes(*given)


def test_a_shell_that_srun_began_starts_what_it_likes_and_several_of_them_are_refused(monkeypatch):
    launched(monkeypatch, "srun", 1, 1)
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")
    assert num_processes(2, 1) == (2, 1)
    launched(monkeypatch, "srun", 2, 1)
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")  # a name that Lightning overlooks
    with pytest.raises(ValueError, match="'bash'"):
        num_processes("auto", 1)


def test_what_lightning_misses_of_srun_is_named(monkeypatch):
    launched(monkeypatch, "srun", 2, 1)
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    assert len(cluster_environment()) == 1
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    with pytest.raises(ValueError, match="--ntasks-per-node"):
        cluster_environment()
