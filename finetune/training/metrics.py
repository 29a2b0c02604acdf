"""Metrics of the training images of an epoch: sums, so that every image counts once on any number of devices."""

import torch
from torch import Tensor

from finetune.distributed.collectives import all_reduce_sum
from finetune.settings.schema import LabelKind
from finetune.training.precision import double

# Shapes: B images, K classes.


class TrainMetrics:
    """Loss and accuracy during training, of several labels the micro F1. Checkpoints save the sums so far.

    Decisions are those of the uncalibrated network: the most probable class, or the labels with a probability above
    1/2. For mixed images the labels are those of the larger part.

    Args:
        label_kind: Whether images have one class or several labels.
    """

    def __init__(self, label_kind: LabelKind) -> None:
        self.label_kind = label_kind
        self.reset()

    def reset(self) -> None:
        """Forget the images so far."""
        # the losses, their weights, and the two counts of which the quotient is the accuracy or the F1
        self._sums = torch.zeros(4, dtype=torch.float64)

    def update(self, logits: Tensor, labels: Tensor, loss_sum: Tensor, weight: Tensor) -> None:
        """Add a batch.

        Args:
            logits: (B, K).
            labels: (B,) or (B, K).
            loss_sum: The sum of the weighted losses.
            weight: The sum of the weights.
        """
        logits = logits.detach()
        if self.label_kind == "single":
            num_right = (logits.argmax(dim=1) == labels).sum()
            num = torch.full_like(num_right, len(labels))
        else:
            predicted = logits > 0
            num_right = 2 * (predicted & (labels > 0)).sum()
            num = predicted.sum() + (labels > 0).sum()
        of_batch = [double(value.detach()) for value in (loss_sum, weight, num_right, num)]
        self._sums = self._sums.to(of_batch[0].device) + torch.stack(of_batch)

    def sums(self, device: torch.device, world_size: int) -> Tensor:
        """Return the sums of all ranks, (4,) float64 on the CPU. Every rank must call this at the same point."""
        if world_size == 1:
            return self._sums.cpu()
        return all_reduce_sum(self._sums.to(device), world_size).cpu()

    def restore(self, sums: Tensor, is_rank_zero: bool) -> None:
        """Restore the result of `sums` on rank 0. The other ranks start at zero, so that the total is the same."""
        self.reset()
        if is_rank_zero:
            self._sums = sums.clone()

    def take(self, device: torch.device, world_size: int) -> dict[str, Tensor]:
        """Return the metrics by name over all ranks, and reset.

        Raises:
            ValueError: No image was trained on.
        """
        loss, weight, num_right, num = self.sums(device, world_size)
        self.reset()
        if weight == 0:
            raise ValueError(undecodable("train"))
        name = "train/accuracy" if self.label_kind == "single" else "train/f1_micro"
        score = num_right / num if num else torch.zeros(())
        return {"train/loss_epoch": (loss / weight).float(), name: score.float()}


def undecodable(split: str) -> str:
    """Return the message for a split of which no image could be decoded."""
    return f"no image of {split} could be decoded: skipped.txt of this run has the reasons"
