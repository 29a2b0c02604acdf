"""Collective operations other than DDP's all-reduce of gradients, none of which makes the CPU wait for a GPU."""

from typing import Any
from weakref import WeakKeyDictionary

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


_cpu_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by strategy


def cpu_group(strategy: Any) -> Any:
    """Return a process group of all ranks that communicates on CPUs (gloo), the same each time.

    Every rank must call this at the same point. On GPUs a collective would wait for their queue, and gathered objects
    would use their memory. The timeout is that of the strategy's own group.
    """
    if dist.get_backend() == "gloo":
        return dist.group.WORLD
    if strategy not in _cpu_groups:
        timeout = lightning_private.process_group_timeout(strategy)
        _cpu_groups[strategy] = dist.new_group(backend="gloo", timeout=timeout)
    return _cpu_groups[strategy]


def gather_on_rank_zero(value: Any, trainer: Any) -> list[Any]:
    """Return the values of all ranks on rank 0, and the own value alone on the others, through the CPU's memory.

    Every rank must call this at the same point.

    Args:
        value: Anything that can be pickled. Tensors are on the CPU.
        trainer: The Trainer.
    """
    if trainer.world_size == 1:
        return [value]
    of_ranks = [value] * trainer.world_size if trainer.is_global_zero else None
    dist.gather_object(value, of_ranks, dst=0, group=cpu_group(trainer.strategy))
    return [value] if of_ranks is None else of_ranks
