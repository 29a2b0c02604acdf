"""The number of processes where torchrun or srun started them: theirs, not a guess that would run each by itself."""

import os
from collections.abc import Sequence
from typing import Any

from pytorch_lightning.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from finetune.system.messages import WrongUsage

_SRUN = "SLURM_STEP_NUM_TASKS"  # which it sets; a batch script alone has the job's SLURM_NTASKS


def cluster_environment(plugins: Sequence[Any]) -> list[ClusterEnvironment]:
    """Return what tells Lightning of a SLURM job, where nothing else does.

    Raises:
        WrongUsage: The job was started without what Lightning must know of it.
    """
    if (
        _has_environment(plugins)
        or TorchElasticEnvironment.detect()
        or not SLURMEnvironment.detect()
    ):
        return []
    if _SRUN not in os.environ:  # a batch script, whose processes are Lightning's to start
        return [LightningEnvironment()]
    # Requeueing is the job script's business: Lightning's would write and later load checkpoints of its own.
    try:
        return [SLURMEnvironment(auto_requeue=False)]
    except RuntimeError as error:  # a variable that it wants is missing
        raise WrongUsage(" ".join(str(error).split())) from error


def num_processes(devices: Any, num_nodes: int, plugins: Sequence[Any]) -> tuple[Any, int]:
    """Return trainer.devices and trainer.num_nodes: what a launcher started, where they were left out.

    Raises:
        ValueError: They were given, and are not what it started.
    """
    if _has_environment(plugins):
        return devices, num_nodes
    if TorchElasticEnvironment.detect():
        launcher, total = "torchrun", int(os.environ["WORLD_SIZE"])
        here: float = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = total / here
    elif _SRUN in os.environ:
        launcher, total = "srun", int(os.environ[_SRUN])
        nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", 1))
        here = total / nodes
        if total == 1 and not SLURMEnvironment.detect():
            # a shell that srun began: what is started there is for Lightning to start
            return devices, num_nodes
        if total > 1 and not SLURMEnvironment.detect():
            name = os.environ.get("SLURM_JOB_NAME")
            raise ValueError(
                f"srun started {total} processes, but Lightning leaves jobs named {name!r} alone: rename it"
            )
    else:
        return devices, num_nodes
    if here % 1 or nodes % 1:
        raise ValueError(
            f"{launcher} started {total} processes, not as many on each machine: that can't be"
        )
    given = count(devices)
    if given not in (None, here) or num_nodes not in (1, nodes):
        raise ValueError(
            f"{launcher} started {total} processes, {here:.0f} on each of {nodes:.0f} machines, but trainer.devices is "
            f"{devices} and trainer.num_nodes {num_nodes}: leave both out"
        )
    return int(here) if devices == "auto" else devices, int(nodes)


def starts_processes() -> bool:
    """Return whether torchrun or srun has started this process, and so any others."""
    return TorchElasticEnvironment.detect() or (SLURMEnvironment.detect() and _SRUN in os.environ)


def is_launched() -> bool:
    """Return whether torchrun or srun has started this process beside others."""
    tasks = int(os.environ.get(_SRUN, 1)) if SLURMEnvironment.detect() else 1
    return tasks > 1 or (TorchElasticEnvironment.detect() and int(os.environ["WORLD_SIZE"]) > 1)


def num_machines() -> int:
    """Return the number of machines on which torchrun or srun has started processes."""
    if TorchElasticEnvironment.detect():
        return int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    return int(os.environ.get("SLURM_STEP_NUM_NODES", 1)) if is_launched() else 1


def _has_environment(plugins: Sequence[Any]) -> bool:
    return any(isinstance(plugin, ClusterEnvironment) for plugin in plugins)


def count(devices: Any) -> int | None:
    """Return how many devices are meant; None where that is for Lightning to find out."""
    if isinstance(devices, str) and "," in devices:
        devices = [name for name in devices.split(",") if name.strip()]
    if isinstance(devices, (list, tuple)):
        return len(devices)
    return None if str(devices) in ("auto", "-1") else int(devices)
