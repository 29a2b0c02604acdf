"""Confidence intervals of shares, and a paired test. Without NumPy: the list of runs needs them at once."""

import math
from collections.abc import Sequence

# Shapes: K classes.

_Z = 1.959964  # standard errors on each side of a 95 % interval


def wilson(num_right: float, num: float) -> tuple[float, float]:
    """Return the 95 % interval of the share `num_right / num`; (0, 1) if `num` is 0.

    Source: Wilson 1927, as in Agresti and Coull 1998 (The American Statistician 52), who recommend it for any number.
    """
    if num == 0:
        return 0.0, 1.0
    share = num_right / num
    z2 = _Z**2
    centre = (share + z2 / (2 * num)) / (1 + z2 / num)
    scale = 1 / (1 + z2 / num)
    half = _Z * scale * math.sqrt(share * (1 - share) / num + z2 / (4 * num**2))
    # Rounding must not leave the share outside: at 0 and at 1 it is an end of the interval.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def interval(num_right: float, num: int) -> str:
    """Return the `wilson` interval as text, `82.6–87.6 %`."""
    low, high = wilson(num_right, num)
    return f"{100 * low:.1f}–{100 * high:.1f} %"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def num_right_of(confusion: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the number of images that are predicted correctly, and of all images.

    Args:
        confusion: The confusion matrix, (K, K). Rows are the true classes.
    """
    if any(count < 0 for row in confusion for count in row):
        raise ValueError("its confusion matrix has counts below 0")
    num_right = sum(row[i] for i, row in enumerate(confusion))
    return num_right, sum(map(sum, confusion))


def mcnemar(only_a: int, only_b: int) -> float:
    """Return the p-value of McNemar's exact, two-sided test.

    It is the probability that two equally good classifiers differ at least this much on the same images.

    Args:
        only_a: Number of images that only the first classifier predicts correctly.
        only_b: Number of images that only the second classifier predicts correctly.

    Source: McNemar 1947; the exact form is a binomial test of the images on which the classifiers differ.
    """
    num = only_a + only_b
    fewer = min(only_a, only_b)
    ways = tail = 1  # the binomial coefficient of num and k, and the sum of those up to k
    for k in range(fewer):
        ways = ways * (num - k) // (k + 1)
        tail += ways
    return min(1.0, 2 * tail / 2**num)
