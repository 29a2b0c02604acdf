"""The loss for several labels an image: binary cross entropy of each label, with weights of the positives."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from finetune.training.loss import nonzero_sum, precise, weighted

# Shapes: B images, M members of an ensemble, K classes.


class MultilabelTarget(NamedTuple):
    """The target of a batch of images.

    Attributes:
        labels: Whether each image has each label (B, K), 0 or 1; for mixed images those of the larger part.
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
        """Return the sum of the weights of the images, or their number if they have no weights.

        The weights of positive labels do not change it, as in torch.
        """
        weights = self.mixed_weights()
        if weights is None:
            return precise(class_weight).new_full((), len(self.labels))
        total = weights.to(precise(class_weight).dtype).sum()
        return nonzero_sum(total, len(self.labels))

    def mixed_weights(self) -> Tensor | None:
        """Return the weight of each image (B,), for mixed images the mean by their shares; None for 1 each."""
        if self.weights is None or self.partner_weights is None or self.share is None:
            return self.weights
        return torch.lerp(self.partner_weights, self.weights, self.share)

    def mixed(self) -> Tensor:
        """Return the labels (B, K), for mixed images the mean by their shares and weights.

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


def multilabel_target(batch: Mapping[str, Any]) -> MultilabelTarget:
    """Return the target of a batch from `Collate`."""
    return MultilabelTarget(
        batch["label"],
        batch.get("partner_label"),
        batch.get("share"),
        batch.get("weight"),
        batch.get("partner_weight"),
    )


def multilabel_loss_sum(
    logits: Tensor, target: MultilabelTarget, class_weight: Tensor, label_smoothing: float
) -> Tensor:
    """Return the sum over images of the mean binary cross entropy over classes, times the weights of the images.

    Divided by `target.weight(class_weight)` it is `torch.nn.BCEWithLogitsLoss` with `pos_weight`. For the members of an
    ensemble it is the mean over members. The target of a mixed image is the mean of two images, by their shares.
    Smoothing moves each target towards 1/2, which is an even distribution over present and absent.

    Args:
        logits: (B, K); for the members of an ensemble (M, B, K).
        target: The target of the same images.
        class_weight: The weight of the positive labels of each class, (K,).
        label_smoothing: Share of each target that is spread evenly, in [0, 1).
    """
    if logits.ndim == 3:
        return torch.stack(
            [multilabel_loss_sum(own, target, class_weight, label_smoothing) for own in logits]
        ).mean()
    logits = precise(logits)
    wanted = target.mixed().to(logits.dtype) * (1 - label_smoothing) + label_smoothing / 2
    losses = F.binary_cross_entropy_with_logits(
        logits, wanted, pos_weight=precise(class_weight).to(logits.dtype), reduction="none"
    )
    weights = target.mixed_weights()
    if weights is not None:
        return weighted(losses.mean(dim=1), weights).sum()
    return losses.mean(dim=1).sum()


def multilabel_losses(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the mean binary cross entropy over classes of each image (B,), from probabilities and labels (B, K)."""
    tiny = torch.finfo(torch.float64).tiny
    labels = labels.to(probabilities.dtype)
    present = labels * probabilities.clamp_min(tiny).log()
    absent = (1 - labels) * (1 - probabilities).clamp_min(tiny).log()
    return -(present + absent).mean(dim=1)


def balanced_positive_weights(num_positive: np.ndarray, num_images: int) -> Tensor:
    """Return a weight for the positives of each class (K,), by which they count as much as its negatives together.

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
