"""The loss: cross entropy with weights and label smoothing. An image has one class, or two if mixed.

`task.SingleLabel.loss_sum` calls it. Another loss is a function here, and a field there chooses it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from finetune.system.messages import WrongUsage

# Shapes: B images, K classes.

_TINY = 1e-30  # far below the smallest weight of an image


class Target(NamedTuple):
    """The target of a batch of images.

    Attributes:
        labels: Class indices (B,); for mixed images those of the larger part.
        partner_labels: Class indices (B,) of the images that were mixed in; None if images are not mixed.
        share: The share of `labels` in each image (B,), in [0, 1]; None if images are not mixed.
        weights: The weight of each image (B,); None for 1 each.
        partner_weights: The weight of each image that was mixed in (B,); None for 1 each.
    """

    labels: Tensor
    partner_labels: Tensor | None = None
    share: Tensor | None = None
    weights: Tensor | None = None
    partner_weights: Tensor | None = None

    def weight(self, class_weight: Tensor) -> Tensor:
        """Return the sum of the weights of the images, by their shares.

        The weight of an image is its own weight times the class weight (K,) of its class.
        """
        own = weighted(precise(class_weight)[self.labels], self.weights)
        if self.share is None or self.partner_labels is None:
            return nonzero_sum(own.sum(), len(self.labels))
        partner = weighted(precise(class_weight)[self.partner_labels], self.partner_weights)
        mixed = torch.lerp(partner, own, self.share.to(own.dtype))
        return nonzero_sum(mixed.sum(), len(self.labels))


def check_smoothing(label_smoothing: float) -> None:
    """Check the share of the target that is spread over all classes.

    Raises:
        WrongUsage: It is out of range.
    """
    if not 0 <= label_smoothing < 1:
        raise WrongUsage(f"label_smoothing must be at least 0 and below 1, not {label_smoothing}")


def target_of(batch: Mapping[str, Any]) -> Target:
    """Return the target of a batch from `Collate`."""
    return Target(
        batch["label"],
        batch.get("partner_label"),
        batch.get("share"),
        batch.get("weight"),
        batch.get("partner_weight"),
    )


def weighted(values: Tensor, weights: Tensor | None) -> Tensor:
    """Return values (B,) times the weights of their images (B,); None for 1 each."""
    return values if weights is None else values * weights.to(values.dtype)


def nonzero_sum(weight: Tensor, num_images: int) -> Tensor:
    """Return the sum of the weights of some images; if all have the weight 0, a number above 0.

    Their mean loss is then 0, not 0 / 0. Only a sum without images is 0, so that ranks recognize an empty batch.
    """
    return weight.clamp_min(_TINY) if num_images else weight


def loss_sum(
    logits: Tensor, target: Target, class_weight: Tensor, label_smoothing: float
) -> Tensor:
    """Return the sum of the weighted losses of images. Divided by `target.weight(class_weight)` it is the mean loss.

    For the members of an ensemble it is the mean over members. The loss of a mixed image is the mean of the losses for
    its two classes, weighted by their shares. That is the cross entropy of the mixed target. Each class and each image
    keeps its own weight, and smoothing applies to both.

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
    logits = precise(logits)
    class_weight = precise(class_weight)
    options: Any = {"weight": class_weight, "label_smoothing": label_smoothing}
    is_mixed = target.share is not None and target.partner_labels is not None
    if target.weights is None and not is_mixed:
        return F.cross_entropy(logits, target.labels, reduction="sum", **options)
    own = F.cross_entropy(logits, target.labels, reduction="none", **options)
    own = weighted(own, target.weights)
    if target.share is None or target.partner_labels is None:
        return own.sum()
    partner = F.cross_entropy(logits, target.partner_labels, reduction="none", **options)
    partner = weighted(partner, target.partner_weights)
    return torch.lerp(partner, own, target.share.to(own.dtype)).sum()


def precise(tensor: Tensor) -> Tensor:
    """Convert a tensor to float32 if its dtype is less precise. In bf16 a sum of 257 ones is 256."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
