"""What devices ask each other beside the gradients, such that no GPU's queue runs empty for it."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from finetune import lightning_private


def all_sum(value: Tensor, num_devices: int) -> Tensor:
    """Return the sum of a number over all devices of a trainer; every device calls this at the same point.

    Lightning's own `reduce` begins with a barrier, at which NCCL lets the CPU wait for all that the GPU has yet to do.
    """
    value = value.detach().clone()
    if num_devices > 1:
        dist.all_reduce(value)
    return value


def cpu_group(strategy: Any) -> Any:
    """Return a group of all devices that speaks through their CPUs; every device calls this at the same point.

    Through GPUs a question would wait for their queue, and objects would take their memory. It waits as long as the
    strategy's own group, by `--trainer.strategy.timeout`.
    """
    if dist.get_backend() == "gloo":
        return dist.group.WORLD
    return dist.new_group(backend="gloo", timeout=lightning_private.process_group_timeout(strategy))
