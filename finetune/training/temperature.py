"""Temperature scaling of logits, fitted on the validation split. The result is exact on any number of devices."""

import torch
from torch import Tensor

from finetune.training.precise_sums import PreciseSums
from finetune.training.precision import double

# Shapes: B images, K classes, G inverse temperatures.

# Fitted temperatures of good networks are between 0.5 and 5 (Guo et al., table 4). Beyond these bounds probabilities
# are practically 0 and 1, or all the same.
LOWEST = 1 / 16
HIGHEST = 16.0
# Weight of the prior, in images. Compared with 1 it lowers the loss of other images by 0.03 if 6 images were fitted, by
# 0.02 for 8, and by nothing for 12 or more (benchmarks/NOTEBOOK.md, "Which epoch is kept").
PRIOR = 3
_PER_OCTAVE = 6
# grid of inverse temperatures
_GRID = torch.logspace(-4, 4, 8 * _PER_OCTAVE + 1, base=2, dtype=torch.float64)
_CHUNK = 2**20  # numbers that are computed at once: 8 MB


class Temperature(PreciseSums):
    """The temperature T with the lowest mean of -log p(label), where p is the softmax of logits / T.

    The loss is convex in b = 1 / T, so its minimum is where its slope is zero. The states are sums over images of slope
    and curvature at fixed values of b. Their size does not depend on the split, and they are summed over ranks. Between
    two values of b the slope is interpolated by a cubic. Class weights and label smoothing are not used.

    If all predictions are right, T would be 0. A prior keeps T away from 0, and near 1 if there are few images. It adds
    `PRIOR` * (b - 1 - log b) to the summed loss, the negative logarithm of a gamma distribution with its mode at T = 1.
    If all N images are right by the margin m, about `PRIOR` in N m are then expected to be wrong. With hundreds of
    images the prior changes T by less than 0.03.

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
        """Add images: logits (B, K) and class indices (B,)."""
        logits = double(logits.detach())
        target = target.to(logits.device)
        num = max(1, _CHUNK // (len(_GRID) * logits.shape[1]))
        grid = _GRID.to(logits.device)
        for rows, labels in zip(logits.split(num), target.split(num), strict=True):
            slope, curvature = derivatives(rows, labels, grid)
            self.slope += slope
            self.curvature += curvature
        self.count += len(target)

    def compute(self) -> Tensor:
        return 1 / _minimum(self.slope.cpu(), self.curvature.cpu())


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature for images of this process, from logits (B, K) and class indices (B,)."""
    metric = Temperature()
    metric.update(logits, labels)
    # `compute` would synchronize with the other ranks
    return float(1 / _minimum(metric.slope, metric.curvature))


def derivatives(logits: Tensor, labels: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and second derivative of the sum of -log softmax(b * logits)[label] by b, at each b (G,).

    The first is the mean of the logits under the softmax, minus the label's logit. The second is their variance.
    """
    # Logits of -inf are clamped: their probability is 0, but 0 * -inf would be NaN.
    # (B, K)
    logits = (logits - logits.amax(dim=1, keepdim=True)).clamp_min(torch.finfo(torch.float32).min)
    p = (inverse[:, None, None] * logits).softmax(dim=2)  # (G, B, K)
    mean = (p * logits).sum(dim=2)  # (G, B)
    variance = (p * (logits - mean[:, :, None]) ** 2).sum(dim=2)
    return (mean - logits.gather(1, labels[:, None]).squeeze(1)).sum(dim=1), variance.sum(dim=1)


def _minimum(slope: Tensor, curvature: Tensor) -> Tensor:
    """Return the b where the slope of loss and prior is zero, from values on the grid (G,), or the nearest bound."""
    if not (slope.isfinite() & curvature.isfinite()).all():
        return torch.tensor(torch.nan, dtype=torch.float64)
    total = slope + PRIOR * (1 - 1 / _GRID)
    if total[0] >= 0 or total[-1] <= 0:
        return _GRID[0 if total[0] >= 0 else -1]
    i = int((total > 0).int().argmax())  # the first grid point above the minimum
    left = float(_GRID[i - 1])
    right = float(_GRID[i])
    step = right - left

    def at(b: float) -> float:
        x = (b - left) / step  # cubic Hermite interpolation
        ends = (1 + 2 * x) * (1 - x) ** 2 * slope[i - 1] + x**2 * (3 - 2 * x) * slope[i]
        tangents = x * (1 - x) ** 2 * curvature[i - 1] - x**2 * (1 - x) * curvature[i]
        return float(ends + step * tangents + PRIOR * (1 - 1 / b))

    low = left
    high = right
    for _ in range(60):  # bisection to the precision of float64
        middle = (low + high) / 2
        if at(middle) > 0:
            high = middle
        else:
            low = middle
    return torch.tensor((low + high) / 2, dtype=torch.float64)
