"""The loss: cross entropy with class weights and label smoothing. An image has one class, or two if mixed."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Shapes: B images, K classes.


class Target(NamedTuple):
    """The target of a batch of images.

    Attributes:
        labels: Class indices (B,); for mixed images those of the larger part.
        partner_labels: Class indices (B,) of the images that were mixed in; None if images are not mixed.
        share: The share of `labels` in each image (B,), in [0, 1]; None if images are not mixed.
    """

    labels: Tensor
    partner_labels: Tensor | None = None
    share: Tensor | None = None

    def weight(self, class_weight: Tensor) -> Tensor:
        """Return the sum of the weights of the images: the class weights (K,) of their classes, by their shares."""
        own = precise(class_weight)[self.labels]
        if self.share is None or self.partner_labels is None:
            return own.sum()
        return torch.lerp(
            precise(class_weight)[self.partner_labels], own, self.share.to(own.dtype)
        ).sum()


def target_of(batch: Mapping[str, Any]) -> Target:
    """Return the target of a batch from `Collate`."""
    return Target(batch["label"], batch.get("partner_label"), batch.get("share"))


def loss_sum(
    logits: Tensor, target: Target, class_weight: Tensor, label_smoothing: float
) -> Tensor:
    """Return the sum of the weighted losses of images. Divided by `target.weight(class_weight)` it is the mean loss.

    For the members of an ensemble it is the mean over members. The loss of a mixed image is the mean of the losses for
    its two classes, weighted by their shares. That is the cross entropy of the mixed target. Each class keeps its own
    weight, and smoothing applies to both.

    Args:
        logits: (B, K); for the members of an ensemble (M, B, K).
        target: The target of the same images.
        class_weight: The weight of each class, (K,).
        label_smoothing: Share of the target spread over all classes, in [0, 1).
    """
    if logits.ndim == 3:
        return torch.stack(
            [loss_sum(own, target, class_weight, label_smoothing) for own in logits]
        ).mean()
    logits, class_weight = precise(logits), precise(class_weight)
    options: Any = {"weight": class_weight, "label_smoothing": label_smoothing}
    if target.share is None or target.partner_labels is None:
        return F.cross_entropy(logits, target.labels, reduction="sum", **options)
    own = F.cross_entropy(logits, target.labels, reduction="none", **options)
    partner = F.cross_entropy(logits, target.partner_labels, reduction="none", **options)
    return torch.lerp(partner, own, target.share.to(own.dtype)).sum()


def precise(tensor: Tensor) -> Tensor:
    """Convert a tensor to float32 if its dtype is less precise. In bf16 a sum of 257 ones is 256."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
