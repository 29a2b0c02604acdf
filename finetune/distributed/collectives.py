"""Collective operations other than DDP's all-reduce of gradients, none of which makes the CPU wait for a GPU."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from finetune import lightning_private


def all_reduce_sum(value: Tensor, world_size: int) -> Tensor:
    """Return the sum of a number over all ranks (all-reduce). Every rank must call this at the same point.

    Lightning's `reduce` begins with a barrier. With NCCL the CPU then waits until the GPU has finished its queue.
    """
    value = value.detach().clone()
    if world_size > 1:
        dist.all_reduce(value)
    return value


def cpu_group(strategy: Any) -> Any:
    """Return a process group of all ranks that communicates on CPUs (gloo).

    Every rank must call this at the same point. On GPUs a collective would wait for their queue, and gathered objects
    would use their memory. The timeout is that of the strategy's own group, `--trainer.strategy.timeout`.
    """
    if dist.get_backend() == "gloo":
        return dist.group.WORLD
    return dist.new_group(backend="gloo", timeout=lightning_private.process_group_timeout(strategy))
