"""The loss of a training step over all ranks: the mean over the global batch, also if a rank has no images of it."""

from dataclasses import dataclass
from inspect import signature

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from finetune import lightning_private
from finetune.distributed.collectives import all_reduce_sum


@dataclass(frozen=True)
class GlobalLoss:
    """Divides losses by the total weight of the global batch. `of_ranks` creates one.

    Attributes:
        weight: Sum of the weights of this rank's images.
        total_weight: Sum of the weights of all ranks' images.
        world_size: Number of ranks.
    """

    weight: Tensor
    total_weight: Tensor
    world_size: int

    @classmethod
    def of_ranks(cls, weight: Tensor, world_size: int) -> "GlobalLoss":
        """Sum the weights of all ranks. Every rank must call this once per step, even without images."""
        return cls(weight, all_reduce_sum(weight, world_size), world_size)

    def loss(self, loss_sum: Tensor) -> Tensor:
        """Return the loss to backpropagate on this rank, from the sum of the weighted losses of its images.

        DDP averages gradients over ranks. The loss is therefore this rank's part of the mean, times the world size.
        """
        return loss_sum * (self.world_size / self.total_weight)

    def mean(self, loss: Tensor) -> Tensor:
        """Return the mean over the global batch, from the loss of each rank. Every rank must call this."""
        return all_reduce_sum(loss, self.world_size) / self.world_size


def zero_loss(module: nn.Module) -> Tensor:
    """Return the loss of a rank without images: zero. Each parameter gets a gradient of zero, which DDP waits for."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    total = torch.stack([(parameter * 0).sum() for parameter in trained]).sum()
    # the dtype of the losses of the other ranks
    return total.to(torch.promote_types(total.dtype, torch.float32))


def set_ddp_arguments(trainer: pl.Trainer) -> None:
    """Let each rank keep its own buffers, and all steps sum the gradients in the same order.

    DDP would also broadcast buffers in the first evaluation batch. A rank without images has no such batch.

    After its first step DDP puts the gradients into other buckets. With three ranks or more, the place of a gradient in
    its bucket decides how its sum is rounded, and a run that is killed and resumed would differ from one that is not.
    So each gradient has a bucket of its own, which torch supports since 2.13. On GPUs DDP chooses the buckets, since
    many small sums take longer there, and resuming is not promised bit for bit.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, DDPStrategy):
        return
    lightning_private.set_ddp_argument(strategy, "broadcast_buffers", False)
    has_bucket_sizes = "bucket_cap_mb_list" in signature(DistributedDataParallel).parameters
    if trainer.world_size > 2 and strategy.root_device.type == "cpu" and has_bucket_sizes:
        lightning_private.set_ddp_argument(strategy, "bucket_cap_mb_list", [0.0])
