"""The number of devices and machines of a run that torchrun or srun has started.

Without it each process would train by itself.
"""

import os
from typing import Any

from pytorch_lightning.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from finetune.system.messages import WrongUsage

# srun sets this variable. A batch script that does not use srun has only SLURM_NTASKS, the tasks of the job.
_SRUN_TASKS = "SLURM_STEP_NUM_TASKS"


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
    """Return `trainer.devices` and `trainer.num_nodes`, as the launcher has them if there is one.

    Args:
        devices: The user's `trainer.devices`; "auto" if it is not set.
        num_nodes: The user's `trainer.num_nodes`; 1 if it is not set.

    Raises:
        ValueError: The user's numbers differ from those of the launcher.
    """
    if TorchElasticEnvironment.detect():
        launcher = "torchrun"
        total = int(os.environ["WORLD_SIZE"])
        per_node: float = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = total / per_node
    elif _SRUN_TASKS in os.environ:
        launcher = "srun"
        total = int(os.environ[_SRUN_TASKS])
        nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", 1))
        per_node = total / nodes
        if not SLURMEnvironment.detect():
            if total == 1:
                # an interactive shell that srun has started: Lightning starts the processes
                return devices, num_nodes
            name = os.environ.get("SLURM_JOB_NAME")
            raise ValueError(
                f"srun started {total} processes, but Lightning ignores jobs named {name!r}: rename it"
            )
    else:
        return devices, num_nodes
    if per_node % 1 or nodes % 1:
        raise ValueError(
            f"{launcher} started {total} processes, with different numbers on the machines: that is not supported"
        )
    requested = count_devices(devices)
    if requested not in (None, per_node) or num_nodes not in (1, nodes):
        raise ValueError(
            f"{launcher} started {total} processes, {per_node:.0f} on each of {nodes:.0f} machines, but "
            f"trainer.devices is {devices} and trainer.num_nodes {num_nodes}: omit both"
        )
    return int(per_node) if devices == "auto" else devices, int(nodes)


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
