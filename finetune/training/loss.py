"""The losses: cross entropy for one class an image, binary cross entropy for several labels; and their weights.

Both have weights of classes and of images, label smoothing, and images that are mixed of two. Which one it is follows
from the labels of a batch: (B,) class indices, or (B, K) numbers of 0 and 1.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Shapes: B images, K classes or labels.

_TINY = 1e-30  # far below the smallest weight of an image


class Target(NamedTuple):
    """The target of a batch of images.

    Attributes:
        labels: Class indices (B,), or whether each image has each label (B, K); for mixed images of the larger part.
        partner_labels: The same of the images that were mixed in; None if images are not mixed.
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

        The weight of an image is its own weight times the class weight (K,) of its class. Of several labels it is its
        own weight alone: the weights of positive labels do not change it, as in torch.
        """
        class_weight = precise(class_weight)
        if self.labels.ndim == 2:
            weights = self.mixed_weights()
            if weights is None:
                return class_weight.new_full((), len(self.labels))
            return _nonzero_sum(weights.to(class_weight.dtype).sum(), len(self.labels))
        own = _weighted(class_weight[self.labels], self.weights)
        if self.share is not None and self.partner_labels is not None:
            partner = _weighted(class_weight[self.partner_labels], self.partner_weights)
            own = torch.lerp(partner, own, self.share.to(own.dtype))
        return _nonzero_sum(own.sum(), len(self.labels))

    def mixed_weights(self) -> Tensor | None:
        """Return the weight of each image (B,), for mixed images the mean by their shares; None for 1 each."""
        if self.weights is None or self.partner_weights is None or self.share is None:
            return self.weights
        return torch.lerp(self.partner_weights, self.weights, self.share)

    def mixed_labels(self) -> Tensor:
        """Return several labels (B, K), for mixed images the mean by their shares and weights.

        The loss is linear in the labels. With `mixed_weights` it is therefore the mean of the weighted losses for the
        labels of both images, by their shares.
        """
        if self.share is None or self.partner_labels is None:
            return self.labels
        share = self.share
        weights = self.mixed_weights()
        if self.weights is not None and weights is not None:
            share = share * self.weights / weights.clamp_min(torch.finfo(weights.dtype).tiny)
        return torch.lerp(self.partner_labels, self.labels, share[:, None])


def target_of(batch: Mapping[str, Any]) -> Target:
    """Return the target of a batch from `Collate`."""
    return Target(
        batch["label"],
        batch.get("partner_label"),
        batch.get("share"),
        batch.get("weight"),
        batch.get("partner_weight"),
    )


def _weighted(values: Tensor, weights: Tensor | None) -> Tensor:
    """Return values (B,) times the weights of their images (B,); None for 1 each."""
    return values if weights is None else values * weights.to(values.dtype)


def _nonzero_sum(weight: Tensor, num_images: int) -> Tensor:
    """Return the sum of the weights of some images; if all have the weight 0, a number above 0.

    Their mean loss is then 0, not 0 / 0. Only a sum without images is 0, so that ranks recognize an empty batch.
    """
    return weight.clamp_min(_TINY) if num_images else weight


def loss_sum(
    logits: Tensor, target: Target, class_weight: Tensor, label_smoothing: float
) -> Tensor:
    """Return the sum of the weighted losses of images. Divided by `target.weight(class_weight)` it is the mean loss.

    For single-label images the mean is torch's `CrossEntropyLoss`, for several labels its `BCEWithLogitsLoss`, where
    the class weights are those of the positives.

    Args:
        logits: (B, K).
        target: The target of the same images.
        class_weight: The weight of each class, or of the positives of each label, (K,).
        label_smoothing: Share of the target in [0, 1) that is spread over all classes; of several labels evenly over
            present and absent.
    """
    of_kind = _cross_entropy if target.labels.ndim == 1 else _binary_cross_entropy
    return of_kind(precise(logits), target, precise(class_weight), label_smoothing)


def _cross_entropy(
    logits: Tensor, target: Target, class_weight: Tensor, label_smoothing: float
) -> Tensor:
    """Return the sum of the losses for one class an image.

    The loss of a mixed image is the mean of the losses for its two classes, weighted by their shares. That is the cross
    entropy of the mixed target. Each class and each image keeps its own weight, and smoothing applies to both.
    """
    options: Any = {"weight": class_weight, "label_smoothing": label_smoothing}
    is_mixed = target.share is not None and target.partner_labels is not None
    if target.weights is None and not is_mixed:
        return F.cross_entropy(logits, target.labels, reduction="sum", **options)
    own = F.cross_entropy(logits, target.labels, reduction="none", **options)
    own = _weighted(own, target.weights)
    if target.share is None or target.partner_labels is None:
        return own.sum()
    partner = F.cross_entropy(logits, target.partner_labels, reduction="none", **options)
    partner = _weighted(partner, target.partner_weights)
    return torch.lerp(partner, own, target.share.to(own.dtype)).sum()


def _binary_cross_entropy(
    logits: Tensor, target: Target, class_weight: Tensor, label_smoothing: float
) -> Tensor:
    """Return the sum over images of the mean loss over labels. Smoothing moves each target towards 1/2."""
    wanted = target.mixed_labels().to(logits.dtype) * (1 - label_smoothing) + label_smoothing / 2
    losses = F.binary_cross_entropy_with_logits(
        logits, wanted, pos_weight=class_weight.to(logits.dtype), reduction="none"
    )
    return _weighted(losses.mean(dim=1), target.mixed_weights()).sum()


def precise(tensor: Tensor) -> Tensor:
    """Convert a tensor to float32 if its dtype is less precise. In bf16 a sum of 257 ones is 256."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def balanced_weights(num_images: np.ndarray) -> Tensor:
    """Return a weight for each class (K,), inversely proportional to its number of images, with mean 1 over images.

    Args:
        num_images: Number of images of each class, (K,), or the sum of their weights.
    """
    counts = torch.from_numpy(num_images)
    return counts.sum() / (len(counts) * torch.where(counts > 0, counts, 1))


def balanced_positive_weights(num_positive: np.ndarray, num_images: int) -> Tensor:
    """Return a weight for the positives of each label (K,), by which they count as much as its negatives together.

    Args:
        num_positive: Number of images with each label, (K,); or the sum of their weights, which have the mean 1.
        num_images: Number of all images.

    Source: the documentation of `pos_weight` of `torch.nn.BCEWithLogitsLoss`.
    """
    positive = torch.from_numpy(num_positive).double()
    negative = num_images - positive
    # A smaller sum of weights is 0 up to rounding: no image, or none with a weight, counts as one.
    least = 1e-12 * num_images
    negative = torch.where(negative > least, negative, 1.0)
    return negative / torch.where(positive > least, positive, 1.0)
