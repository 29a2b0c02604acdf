"""Which part of every batch is this device's, and who speaks for it."""

from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def batch_share(trainer: "pl.Trainer | None") -> tuple[int, int]:
    """Return (i, n): this device takes the i-th of n parts of every batch. Those that share a head take the same."""
    if trainer is None:
        return 0, 1
    mesh = _mesh(trainer)
    if mesh is None:
        return trainer.global_rank, trainer.world_size
    return mesh["data_parallel"].get_local_rank(), mesh["data_parallel"].size()


def is_counted(trainer: pl.Trainer) -> bool:
    """Return whether this device speaks for the pictures that it sees: of those that see the same, the first does."""
    mesh = _mesh(trainer)
    return mesh is None or mesh["tensor_parallel"].get_local_rank() == 0


def group_of_batch(trainer: pl.Trainer) -> Any:
    """Return the process group whose devices' parts make up a batch; None for all devices."""
    mesh = _mesh(trainer)
    return None if mesh is None else mesh["data_parallel"].get_group()


def is_sharded(trainer: pl.Trainer) -> bool:
    """Return whether the forward pass needs every device, also those without a picture."""
    return _mesh(trainer) is not None


def own_buffers(trainer: pl.Trainer) -> None:
    """Let each device have its own buffers.

    DDP would broadcast them in the first evaluation batch too, which a device without pictures never has.
    """
    if isinstance(trainer.strategy, DDPStrategy):
        trainer.strategy._ddp_kwargs["broadcast_buffers"] = False


def zero_loss(module: nn.Module) -> Tensor:
    """Return the loss of no picture: a zero that still reaches every parameter, since DDP waits for each gradient."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    local = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in trained]
    total = torch.stack([(part * 0).sum() for part in local]).sum()
    return total.to(torch.promote_types(total.dtype, torch.float32))  # as the losses that devices add to it


def _mesh(trainer: pl.Trainer) -> DeviceMesh | None:
    strategy = trainer.strategy
    if isinstance(strategy, ModelParallelStrategy) and dist.is_initialized():
        return strategy.device_mesh
    return None
