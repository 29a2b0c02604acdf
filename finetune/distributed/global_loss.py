"""The mean loss over the global batch. Each rank has the images of its per-rank batch."""

from dataclasses import dataclass

from torch import Tensor

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
