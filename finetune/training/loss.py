"""The loss: cross entropy, with weights of classes and label smoothing, of one class a picture or of two in shares."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Shapes: B pictures, K classes.


class Target(NamedTuple):
    """What the pictures of a batch are to be called.

    Attributes:
        labels: Class indices (B,), of mixed pictures those of the larger part.
        partner_labels: Of mixed pictures the class indices of what was mixed in (B,), else None.
        share: How much of each picture is of `labels` (B,), in [0, 1].
    """

    labels: Tensor
    partner_labels: Tensor | None = None
    share: Tensor | None = None

    def weight(self, class_weight: Tensor) -> Tensor:
        """Return the sum of what the pictures count, by the weights of their classes (K,) in their shares."""
        own = _precise(class_weight)[self.labels]
        if self.share is None or self.partner_labels is None:
            return own.sum()
        return torch.lerp(
            _precise(class_weight)[self.partner_labels], own, self.share.to(own.dtype)
        ).sum()


def target_of(batch: Mapping[str, Any]) -> Target:
    """Return the target of a batch as `Collate` makes them."""
    return Target(batch["label"], batch.get("partner_label"), batch.get("share"))


def loss_sum(
    logits: Tensor, target: Target, class_weight: Tensor, label_smoothing: float
) -> Tensor:
    """Return the sum of the pictures' losses, of an ensemble's members their mean: over `target.weight` it is a mean.

    Of a mixed picture it is the mean of the losses for its two classes by their shares, which is the cross entropy of
    the mixed target; each class has its own weight, and smoothing takes from both.

    Args:
        logits: (B, K), or of members (M, B, K).
        target: Of these pictures.
        class_weight: What each class counts, (K,).
        label_smoothing: Share of the target spread over all classes, in [0, 1).
    """
    if logits.ndim == 3:
        return torch.stack(
            [loss_sum(own, target, class_weight, label_smoothing) for own in logits]
        ).mean()
    logits, class_weight = _precise(logits), _precise(class_weight)
    options: Any = {"weight": class_weight, "label_smoothing": label_smoothing}
    if target.share is None or target.partner_labels is None:
        return F.cross_entropy(logits, target.labels, reduction="sum", **options)
    own = F.cross_entropy(logits, target.labels, reduction="none", **options)
    partner = F.cross_entropy(logits, target.partner_labels, reduction="none", **options)
    return torch.lerp(partner, own, target.share.to(own.dtype)).sum()


def _precise(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 if it is less precise: in bf16 a sum of 257 ones is 256."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
