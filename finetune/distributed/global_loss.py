"""The loss as a mean over the global batch, of which each rank has a part."""

from dataclasses import dataclass

from torch import Tensor

from finetune.distributed.collectives import all_sum


@dataclass(frozen=True)
class GlobalLoss:
    """Divides by the weight of all images of a step, on all ranks; `of_ranks` makes one.

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
        """Sum the weights of all ranks; every rank calls this once in a step, with or without images."""
        return cls(weight, all_sum(weight, world_size), world_size)

    def loss(self, loss_sum: Tensor) -> Tensor:
        """Return what a rank backpropagates, from the sum of the weighted losses of its images.

        DDP averages the gradients of ranks, so each rank takes its part of the mean times their number.
        """
        return loss_sum * (self.world_size / self.total_weight)

    def mean(self, loss: Tensor) -> Tensor:
        """Return the mean over the global batch from what each rank backpropagates; every rank calls this."""
        return all_sum(loss, self.world_size) / self.world_size
