"""The temperature of a network's logits, fitted on the validation split: exact on any number of devices."""

import torch
from torch import Tensor

from finetune.training.precise_sums import PreciseSums
from finetune.training.precision import double

# Shapes: B pictures, K classes, G inverse temperatures.

# What is fitted of good networks lies from a half to five (Guo et al., table 4). Beyond these bounds nothing is lost:
# probabilities are one class's alone, or all the same.
LOWEST, HIGHEST = 1 / 16, 16.0
# How many pictures the prior counts for. Against 1 it lowers the loss of other pictures by 0.03 where 6 were fitted, by
# 0.02 where 8 were, and changes nothing from 12 on (docs/benchmarks.md, "Which epoch is kept").
PRIOR = 3
_PER_OCTAVE = 6
# inverse temperatures
_GRID = torch.logspace(-4, 4, 8 * _PER_OCTAVE + 1, base=2, dtype=torch.float64)
_CHUNK = 2**20  # numbers at once: 8 MB


class Temperature(PreciseSums):
    """The T for which the softmax of logits / T fits the labels best, by the mean of -log p(label).

    That is convex in b = 1 / T, so that its slope tells where the minimum is. Sums over pictures of slope and curvature
    at fixed b are all that is kept, whatever the size of the split, and devices add theirs up; between two b the
    slope is a cubic. Every picture counts once: neither class weights nor label smoothing are part of it.

    A split that is all right would say T = 0. A prior, b - 1 - log b times `PRIOR`, keeps it finite, and near 1 where
    pictures are few: the logarithm of a gamma distribution with its mode at T = 1. Of N pictures that are right by the
    margin m, about `PRIOR` in N m are then expected to be wrong. On hundreds of pictures it moves T by less than 0.03.

    Source: Guo et al. 2017 (arXiv:1706.04599), section 4.2.
    """

    slope: Tensor
    curvature: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("slope", len(_GRID)), ("curvature", len(_GRID)), ("count", ())):
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, target: Tensor) -> None:
        """Add pictures: logits (B, K) and class indices (B,)."""
        logits = double(logits.detach())
        target = target.to(logits.device)
        num, grid = max(1, _CHUNK // (len(_GRID) * logits.shape[1])), _GRID.to(logits.device)
        for rows, labels in zip(logits.split(num), target.split(num), strict=True):
            slope, curvature = derivatives(rows, labels, grid)
            self.slope += slope
            self.curvature += curvature
        self.count += len(target)

    def compute(self) -> Tensor:
        return 1 / _minimum(self.slope.cpu(), self.curvature.cpu())


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature of images that one process has, logits (B, K) and class indices (B,)."""
    metric = Temperature()
    metric.update(logits, labels)
    # `compute` would ask the other processes
    return float(1 / _minimum(metric.slope, metric.curvature))


def derivatives(logits: Tensor, labels: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and second derivative of the sum of -log softmax(b * logits)[label] by b, at each b (G,).

    They are the mean of the logits under the softmax less the label's, and their variance.
    """
    # A logit of -inf has the probability 0 at any temperature, which 0 * -inf would not say.
    # (B, K)
    logits = (logits - logits.amax(dim=1, keepdim=True)).clamp_min(torch.finfo(torch.float32).min)
    p = (inverse[:, None, None] * logits).softmax(dim=2)  # (G, B, K)
    mean = (p * logits).sum(dim=2)  # (G, B)
    variance = (p * (logits - mean[:, :, None]) ** 2).sum(dim=2)
    return (mean - logits.gather(1, labels[:, None]).squeeze(1)).sum(dim=1), variance.sum(dim=1)


def _minimum(slope: Tensor, curvature: Tensor) -> Tensor:
    """Return the b at which slope and prior add up to zero, from those at the grid (G,); a bound if there is none."""
    if not (slope.isfinite() & curvature.isfinite()).all():
        return torch.tensor(torch.nan, dtype=torch.float64)
    total = slope + PRIOR * (1 - 1 / _GRID)
    if total[0] >= 0 or total[-1] <= 0:
        return _GRID[0 if total[0] >= 0 else -1]
    i = int((total > 0).int().argmax())  # the first beyond the minimum
    left, right = float(_GRID[i - 1]), float(_GRID[i])
    step = right - left

    def at(b: float) -> float:
        x = (b - left) / step  # Hermite's cubic
        ends = (1 + 2 * x) * (1 - x) ** 2 * slope[i - 1] + x**2 * (3 - 2 * x) * slope[i]
        tangents = x * (1 - x) ** 2 * curvature[i - 1] - x**2 * (1 - x) * curvature[i]
        return float(ends + step * tangents + PRIOR * (1 - 1 / b))

    low, high = left, right
    for _ in range(60):  # halves: as near as float64 goes
        middle = (low + high) / 2
        low, high = (low, middle) if at(middle) > 0 else (middle, high)
    return torch.tensor((low + high) / 2, dtype=torch.float64)
