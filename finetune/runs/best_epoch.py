"""The choice of the best epoch: the latest one within one standard error of the highest value of the metric.

With 30 validation images, the highest accuracy among 25 to 50 epochs is a matter of luck, and often an early one. The
one-standard-error rule (Breiman et al., Classification and Regression Trees, 1984, section 3.4.3) takes the simplest
model within one standard error of the best. With a falling learning rate, the latest epoch is the one that has
converged. The weights before training count as epoch 0 if the head was fitted: training can make a pretrained network
worse. docs/decisions.md has the results.
"""

import math
from types import MappingProxyType

import numpy as np

# the metric by which the best epoch is chosen, by kind of labels
MONITORS = MappingProxyType({"single": "val/accuracy", "several": "val/mAP"})


def standard_error(accuracy: float, num_images: float) -> float:
    """Return the standard error of an accuracy on `num_images` independent images; 0 if their number is unknown (0)."""
    return math.sqrt(accuracy * (1 - accuracy) / num_images) if num_images else 0.0


def num_trials_of_labels(counts: np.ndarray) -> float:
    """Return the effective number of images n of a mean average precision (mAP), 0 without positives.

    A mAP of m has about the standard error of a share m of n images, `standard_error(m, n)`. That assumes:

    1. The average precision m of a label with p positives has the variance of a share of p images, m (1 - m) / p.
       This is the logit interval of Boyd et al., carried back to m.
    2. The K labels with positives are independent. Labels that occur together are not: n is then too large.
    3. All labels have the same average precision m.

    The variance of the mean of K labels is then m (1 - m) sum(1 / p) / K**2, which is m (1 - m) / n for
    n = K**2 / sum(1 / p). With the same p for each label, n = K p.

    Args:
        counts: Number of images with each label, (num_labels,), those that were measured.

    Source: Boyd, Eng and Page 2013, "Area under the precision-recall curve: point estimates and confidence intervals".
    """
    present = counts[counts > 0]
    return float(len(present) ** 2 / (1 / present).sum()) if len(present) else 0.0


def lowest_acceptable(highest: float, num_images: float) -> float:
    """Return the lowest value of the monitored metric that is within a standard error of the highest.

    Args:
        highest: The highest value so far.
        num_images: Number of validation images, for several labels the effective one; 0 if it is unknown.
    """
    return highest - standard_error(highest, num_images)
