"""Counts of positive and negative images by logit and label: sums from which several metrics follow.

Average precision, calibration and thresholds of several labels need the order of all images. Their logits would grow
with the data, and float sums of them would depend on the number of devices. Counts in fixed bins do neither: they are
integers, so that everything that is computed from them is bit for bit the same on any number of devices.
"""

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from finetune.training.precision import double

# Shapes: B images, K classes.

NUM_BINS = 1000
# Bins are even in u = z / (_SPREAD + |z|), which lies in (-1, 1) for any logit z. At z = 0 a bin is 0.004 wide, at 4 it
# is 0.04 and at 10 it is 0.14. So no logit is out of range, and the bins are narrow where logits usually are.
_SPREAD = 2.0
_NEARLY_ONE = 1 - 1e-9  # u of a logit of 4e9, instead of an infinite one
_HIGHEST = 1e6  # logits beyond it are in the outermost bins anyway


class LogitHistogram(Metric):
    """Counts the images by label, whether they have it, and the bin of their logit."""

    full_state_update = False
    counts: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        empty = torch.zeros(2, num_classes, NUM_BINS, dtype=torch.int64)
        self.add_state("counts", empty, dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add images: logits (B, K) and labels (B, K), 0 or 1."""
        self.counts += histogram(logits, labels).to(self.counts.device)

    def compute(self) -> Tensor:
        """Return the counts of negatives and positives, (2, K, NUM_BINS)."""
        return self.counts


def histogram(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the counts of negatives and positives of each class by bin, (2, K, NUM_BINS) int64.

    Args:
        logits: (B, K). NaN counts as 0; a loss that is NaN stops a fit.
        labels: (B, K), 0 or 1.
    """
    num_classes = logits.shape[1]
    z = double(logits.detach()).nan_to_num(0.0).clamp(-_HIGHEST, _HIGHEST)
    u = z / (_SPREAD + z.abs())
    bins = ((u + 1) * (NUM_BINS / 2)).long().clamp(0, NUM_BINS - 1)
    is_positive = labels.to(bins.device).long()
    rows = is_positive * num_classes + torch.arange(num_classes, device=bins.device)
    flat = (rows * NUM_BINS + bins).flatten()
    counts = torch.zeros(2 * num_classes * NUM_BINS, dtype=torch.int64, device=bins.device)
    counts.index_add_(0, flat, torch.ones_like(flat))
    return counts.view(2, num_classes, NUM_BINS)


def logit_at(place: np.ndarray) -> np.ndarray:
    """Return the logit at a place among the bins: 0 is the lower edge of the first one, 0.5 its middle."""
    u = (2 * place / NUM_BINS - 1).clip(-_NEARLY_ONE, _NEARLY_ONE)
    return _SPREAD * u / (1 - np.abs(u))


def bin_centres() -> np.ndarray:
    """Return the logit in the middle of each bin, (NUM_BINS,)."""
    return logit_at(np.arange(NUM_BINS) + 0.5)


def average_precision(counts: Tensor) -> Tensor:
    """Return the average precision of each class, (K,) float64; NaN if it has no positives.

    It is the expected value if the images of a bin are in random order. scikit-learn's value for the exact order then
    differs by chance only. The tests hold the mean over classes to 1e-3 of it.

    Args:
        counts: Negatives and positives by bin, (2, K, NUM_BINS).

    Source: McSherry and Najork 2008, "Computing information retrieval performance measures efficiently in the presence
    of tied scores", for the mean over the orders of equal scores.
    """
    negatives, positives = counts.cpu().double().flip(2)  # from the highest logit
    both = positives + negatives
    hits_above = positives.cumsum(dim=1) - positives
    above = both.cumsum(dim=1) - both
    # At position i of a bin with t images, p of them positive: the image is positive with probability p / t, and then
    # the precision is (hits_above + 1 + (i - 1) (p - 1) / (t - 1)) / (above + i). The sum over i is a digamma function.
    slope = (positives - 1) / (both - 1).clamp_min(1)
    first = hits_above + 1
    harmonic = torch.digamma(above + both + 1) - torch.digamma(above + 1)
    of_bin = slope * both + (first - slope * (above + 1)) * harmonic
    share = positives / both.clamp_min(1)
    # rounding may carry a perfect order above 1
    return ((share * of_bin).sum(dim=1) / positives.sum(dim=1)).clamp(max=1)


def mean_average_precision(of_classes: Tensor) -> Tensor:
    """Return the mean of the average precision over the classes that have positives; NaN if none has."""
    return of_classes[~of_classes.isnan()].mean()
