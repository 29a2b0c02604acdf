"""The loss: cross entropy, with weights of classes and label smoothing."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Shapes: B pictures, K classes.


def loss_sum(logits: Tensor, labels: Tensor, class_weight: Tensor, label_smoothing: float) -> Tensor:
    """Return the sum of the pictures' losses: over the sum of their weights it is their mean.

    Args:
        logits: (B, K).
        labels: Class indices (B,).
        class_weight: What each class counts, (K,).
        label_smoothing: Share of the target spread over all classes, in [0, 1).
    """
    return F.cross_entropy(logits, labels, class_weight, reduction="sum", label_smoothing=label_smoothing)


def balanced_weights(labels: np.ndarray, num_classes: int) -> Tensor:
    """Return a weight for each class (num_classes,), inverse to its frequency in labels (N,), 1 on their average."""
    counts = torch.bincount(torch.from_numpy(labels), minlength=num_classes)
    return counts.sum() / (num_classes * counts.clamp_min(1))
