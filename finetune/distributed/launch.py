"""The number of devices and machines of a run that torchrun or srun has started.

Without it each process would train by itself.
"""

import os
from typing import Any

import torch
from pytorch_lightning.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from finetune.system.machine import num_cores
from finetune.system.messages import WrongUsage, counted

# srun sets this variable. A batch script that does not use srun has only SLURM_NTASKS, the tasks of the job.
_SRUN_TASKS = "SLURM_STEP_NUM_TASKS"
_PROCESSES_PER_CORE = 8  # at most; more of them only compete for the cores


def cluster_environment() -> list[ClusterEnvironment]:
    """Return a list with the plugin that describes a SLURM job to Lightning; an empty list if none is needed.

    Raises:
        WrongUsage: SLURM variables that Lightning needs are missing.
    """
    if TorchElasticEnvironment.detect() or not SLURMEnvironment.detect():
        return []
    if _SRUN_TASKS not in os.environ:  # a batch script: Lightning starts the processes
        return [LightningEnvironment()]
    # Lightning's requeueing would write and load checkpoints of its own. Requeueing is left to the job script.
    try:
        return [SLURMEnvironment(auto_requeue=False)]
    except RuntimeError as error:  # a variable is missing
        raise WrongUsage(" ".join(str(error).split())) from error


def num_processes(devices: Any, num_nodes: int) -> tuple[Any, int]:
    """Return `trainer.devices` and `trainer.num_nodes`: those of the launcher, if there is one and they are not set.

    Lightning refuses numbers that differ from those of the launcher.

    Args:
        devices: The user's `trainer.devices`; "auto" if it is not set.
        num_nodes: The user's `trainer.num_nodes`; 1 if it is not set.

    Raises:
        ValueError: srun has started several processes that Lightning would not join.
    """
    if TorchElasticEnvironment.detect():
        total = int(os.environ["WORLD_SIZE"])
        per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    elif SLURMEnvironment.detect() and _SRUN_TASKS in os.environ:
        total = int(os.environ[_SRUN_TASKS])
        per_node = total // int(os.environ.get("SLURM_STEP_NUM_NODES", 1))
    elif int(os.environ.get(_SRUN_TASKS, 1)) > 1:
        name = os.environ.get("SLURM_JOB_NAME")
        raise ValueError(
            f"srun started several processes, but Lightning ignores jobs named {name!r}: rename it"
        )
    else:  # also an interactive shell that srun has started: Lightning starts the processes
        return devices, num_nodes
    if devices == "auto":
        devices = per_node
    return devices, total // per_node if num_nodes == 1 else num_nodes


def check_num_processes(devices: Any, accelerator: Any, setting: str = "trainer.devices") -> None:
    """Make sure, before any is started, that the processes on a CPU are not far more than its cores.

    Args:
        devices: The user's `trainer.devices`.
        accelerator: The user's `trainer.accelerator`.
        setting: The full name of the setting.

    Raises:
        WrongUsage: There are more than 8 for each core.
    """
    most = _PROCESSES_PER_CORE * num_cores()
    if not str(devices).isdigit() or int(devices) <= most:
        return
    if accelerator == "cpu" or (accelerator == "auto" and not torch.accelerator.is_available()):
        raise WrongUsage(
            f"{devices}: at most {most} processes on {counted(num_cores(), 'CPU core')}", setting
        )


def has_launcher() -> bool:
    """Return whether torchrun or srun has started this process, even if it is the only one."""
    return TorchElasticEnvironment.detect() or (
        SLURMEnvironment.detect() and _SRUN_TASKS in os.environ
    )


def count_devices(devices: Any) -> int | None:
    """Return the number of devices that `trainer.devices` asks for; None if Lightning determines it."""
    if isinstance(devices, str) and "," in devices:
        devices = [name for name in devices.split(",") if name.strip()]
    if isinstance(devices, (list, tuple)):
        return len(devices)
    return None if str(devices) in ("auto", "-1") else int(devices)
