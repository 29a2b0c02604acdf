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

    Args:
        devices: The user's `trainer.devices`; "auto" or -1 if the number is not set.
        num_nodes: The user's `trainer.num_nodes`; 1 if it is not set.

    Raises:
        WrongUsage: The numbers differ from those of the launcher. Of one device Lightning would not notice it: each
            process would train by itself.
    """
    if TorchElasticEnvironment.detect():
        launcher = "torchrun"
        total = int(os.environ["WORLD_SIZE"])
        per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = total // per_node
    elif _SRUN_TASKS in os.environ:
        launcher = "srun"
        total = int(os.environ[_SRUN_TASKS])
        nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", 1))
        per_node = total // nodes
    else:
        return devices, num_nodes
    started = f"{launcher} started {total} processes"
    if launcher == "srun" and not SLURMEnvironment.detect():
        if total == 1:  # an interactive shell that srun has started: Lightning starts the processes
            return devices, num_nodes
        name = os.environ.get("SLURM_JOB_NAME")
        raise WrongUsage(f"{started}, but Lightning ignores jobs named {name!r}: rename it")
    if per_node * nodes != total:
        raise WrongUsage(
            f"{started}, with different numbers on the machines: that is not supported"
        )
    requested = count_devices(devices)
    if requested not in (None, per_node) or num_nodes not in (1, nodes):
        raise WrongUsage(
            f"{started}, {per_node} on each of {counted(nodes, 'machine')}, but trainer.devices is {devices} and "
            f"trainer.num_nodes {num_nodes}: omit both"
        )
    if requested is None:
        devices = per_node
    return devices, nodes


def check_num_processes(devices: Any, accelerator: Any, setting: str = "trainer.devices") -> None:
    """Make sure, before any is started, that the processes on a CPU are not far more than its cores.

    Args:
        devices: The user's `trainer.devices`.
        accelerator: The user's `trainer.accelerator`.
        setting: The full name of the setting.

    Raises:
        WrongUsage: There are more than 8 for each core, or it is no number.
    """
    most = _PROCESSES_PER_CORE * num_cores()
    if (count_devices(devices) or 0) <= most:
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
    """Return the number of devices that `trainer.devices` asks for; None if Lightning determines it.

    Raises:
        WrongUsage: It is no number.
    """
    if isinstance(devices, str) and "," in devices:
        devices = [name for name in devices.split(",") if name.strip()]
    if isinstance(devices, (list, tuple)):
        return len(devices)
    if str(devices) in ("auto", "-1"):
        return None
    try:
        return int(devices)
    except ValueError as error:
        raise WrongUsage(
            f"{devices!r}: pass a number, GPUs such as 0,2, or auto", "trainer.devices"
        ) from error


def num_local_devices(devices: Any, accelerator: str) -> int:
    """Return the number of this machine's devices that a run uses.

    Args:
        devices: The user's `trainer.devices`.
        accelerator: The user's `trainer.accelerator`.

    Raises:
        WrongUsage: `devices` is no number.
    """
    may_be_cuda = accelerator in ("auto", "gpu", "cuda")
    return count_devices(devices) or (torch.cuda.device_count() if may_be_cuda else 0) or 1
