"""Fits a calibration to the logits and labels of the validation images."""

import math

import numpy as np
import torch
from torch import Tensor, nn

from finetune.training.calibration import (
    HIGHEST,
    LEAST_TO_CHOOSE,
    LOWEST,
    MOST_BIAS,
    Calibration,
)
from finetune.training.threshold import Aim, choose, is_reached

# Shapes: N images, K classes or labels.

# Weight of the prior, in images. Compared with 1 it lowers the loss of other images by 0.03 if 6 images were fitted, by
# 0.02 for 8, and by nothing for 12 or more (benchmarks/NOTEBOOK.md, "Which epoch is kept").
PRIOR = 3
DEFAULT_AIM = Aim("f1")  # of several labels
_MAX_STEPS = 100  # of Newton's method; about eight are needed
_CHUNK = 2**22  # logits that are fitted at once: some 100 MB
_MOST_LOGIT = 1e4  # of several labels; beyond it a label is certain

Array = np.ndarray


def fit_calibration(logits: Tensor, labels: Tensor, aim: Aim | None) -> Calibration:
    """Return the calibration for images. Of one class an image, nothing is fitted if logits are not finite.

    Args:
        logits: (N, K), on the CPU.
        labels: Class indices (N,), or whether each image has each label (N, K).
        aim: What thresholds are chosen for; None for no threshold, and for the highest F1 of each of several labels.
    """
    if labels.ndim == 1:
        scale = (fit_scale(logits, labels),)
        if not math.isfinite(scale[0]):
            return Calibration.unfitted("single", logits.shape[1])
        fitted = Calibration("single", scale, (0.0,), num_images=len(labels))
        if (
            aim is None
        ):  # the probabilities of all images take a multiple of the memory of the logits
            return fitted
    else:
        scales, biases = fit_scale_and_bias(logits, labels)
        fitted = Calibration("several", tuple(scales.tolist()), tuple(biases.tolist()))
    return with_thresholds(fitted, fitted.probabilities(logits).numpy(), labels.numpy(), aim)


def with_thresholds(
    calibration: Calibration, probabilities: Array, labels: Array, aim: Aim | None
) -> Calibration:
    """Return a calibration with thresholds that are chosen for an aim.

    Args:
        calibration: The calibration. Of one class an image, it stays as it is without an aim.
        probabilities: The calibrated probabilities, (N, K).
        labels: Class indices (N,), or whether each image has each label (N, K).
        aim: As in `fit_calibration`.
    """
    if calibration.label_kind == "single":
        if aim is None or aim.positive is None:
            return calibration
        choice = choose(aim, probabilities[:, aim.positive], labels == aim.positive)
        chosen = () if choice.value is None else (choice.value,)
        return calibration._replace(
            thresholds=chosen, num_images=len(labels), aim=aim, reached=choice.reached
        )
    has_label = labels > 0
    default = _thresholds_of_labels(DEFAULT_AIM, probabilities, has_label)
    wanted = default if aim is None else _thresholds_of_labels(aim, probabilities, has_label)
    unreached = [
        k
        for k, own in enumerate(wanted)
        if aim is not None
        and (own is None or not is_reached(aim, probabilities[:, k] >= own, has_label[:, k]))
    ]
    thresholds = [
        own if own is not None else other for own, other in zip(wanted, default, strict=True)
    ]
    return calibration._replace(
        thresholds=tuple(0.5 if value is None else value for value in thresholds),
        num_images=len(labels),
        aim=aim,
        unreached=tuple(unreached),
    )


def _thresholds_of_labels(aim: Aim, probabilities: Array, has_label: Array) -> list[float | None]:
    """Return the threshold of each label for an aim, K; None where none reaches it.

    A label with few positives or negatives has the threshold that is best for all labels together.
    """
    num_positive = has_label.sum(axis=0)
    has_enough = np.minimum(num_positive, len(has_label) - num_positive) >= LEAST_TO_CHOOSE
    shared: float | None = 0.5
    if not has_enough.all() and has_label.any() and not has_label.all():
        shared = choose(aim, probabilities.ravel(), has_label.ravel()).value
    return [
        choose(aim, probabilities[:, k], has_label[:, k]).value if has_enough[k] else shared
        for k in range(len(has_enough))
    ]


def fit_scale(logits: Tensor, labels: Tensor) -> float:
    """Return the scale b = 1 / temperature with the lowest sum of -log softmax(b * logits)[label].

    The sum is convex in b: Newton's method finds where its slope is zero, within bounds that halve if a step leaves
    them. Class weights and label smoothing are not used.

    If all predictions are right, b would be infinite. A prior keeps it finite, and near 1 if there are few images: it
    adds `PRIOR` * (b - 1 - log b) to the sum, the negative logarithm of a gamma distribution with its mode at 1. If all
    N images are right by the margin m, about `PRIOR` in N m are then expected to be wrong. With hundreds of images the
    prior changes b by less than 0.03.

    Args:
        logits: (N, K).
        labels: Class indices (N,).

    Returns:
        From `LOWEST` to `HIGHEST`; NaN if logits are not finite.

    Source: Guo et al. 2017 (arXiv:1706.04599), section 4.2.
    """
    low = LOWEST
    high = HIGHEST
    for bound, sign in ((low, 1), (high, -1)):
        slope, _ = _slope_and_curvature(logits, labels, bound)
        if math.isnan(slope):
            return math.nan
        if sign * slope >= 0:
            return bound
    b = 1.0
    for _ in range(_MAX_STEPS):
        slope, curvature = _slope_and_curvature(logits, labels, b)
        low, high = (low, b) if slope > 0 else (b, high)
        new = b - slope / curvature
        if not low <= new <= high:
            new = math.sqrt(low * high)
        if abs(new - b) <= 1e-13 * b:
            break
        b = new
    return b


def _slope_and_curvature(logits: Tensor, labels: Tensor, b: float) -> tuple[float, float]:
    """Return the first and second derivative by b of the sum of losses and prior in `fit_scale`; NaN if not finite.

    For an image the first is the mean of the logits under the softmax, minus the label's logit. The second is their
    variance.
    """
    slope = PRIOR * (1 - 1 / b)
    curvature = PRIOR / b**2
    num = max(1, _CHUNK // logits.shape[1])
    for rows, of_rows in zip(logits.split(num), labels.split(num), strict=True):
        # Logits of -inf are clamped: their probability is 0, but 0 * -inf would be NaN.
        z = rows.double()
        z = (z - z.amax(dim=1, keepdim=True)).clamp_min(torch.finfo(torch.float32).min)
        p = (b * z).softmax(dim=1)
        mean = (p * z).sum(dim=1)
        slope += float((mean - z.gather(1, of_rows[:, None]).squeeze(1)).sum())
        curvature += float((p * (z - mean[:, None]) ** 2).sum())
    return (slope, curvature) if math.isfinite(slope + curvature) else (math.nan, math.nan)


def fit_scale_and_bias(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale a and bias b of each label (K,), with the lowest sum of -log p(label) for p = sigmoid(a z + b).

    If all predictions are right, a would be infinite. Priors keep the label near a = 1 and b = 0 if there are few
    images: as for a temperature, `PRIOR` * (a - 1 - log a) is added to the sum, and b ** 2 / 2. The sum is convex, and
    Newton's method finds its minimum.

    Args:
        logits: (N, K). NaN counts as 0; a loss that is NaN stops a fit.
        labels: Whether each image has each label, (N, K).

    Source: Platt 1999, "Probabilistic outputs for support vector machines".
    """
    num = max(1, _CHUNK // max(1, len(logits)))
    fitted = [
        _fit_labels(z.T.double().nan_to_num(0.0).clamp(-_MOST_LOGIT, _MOST_LOGIT), y.T.double())
        for z, y in zip(logits.split(num, dim=1), labels.split(num, dim=1), strict=True)
    ]
    scale, bias = (torch.cat(column) for column in zip(*fitted, strict=True))
    return scale.clamp(LOWEST, HIGHEST), bias.clamp(-MOST_BIAS, MOST_BIAS)


def _fit_labels(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and bias of some labels from their logits and labels, (K, N) float64; see `fit_scale_and_bias`."""
    a = torch.ones(len(z), dtype=torch.float64)
    b = torch.zeros(len(z), dtype=torch.float64)

    def cost(a: Tensor, b: Tensor) -> Tensor:
        logits = a[:, None] * z + b[:, None]
        losses = nn.functional.softplus(logits) - y * logits
        prior = PRIOR * (a - 1 - a.clamp_min(1e-300).log()) + b**2 / 2
        return torch.where(a > 0, losses.sum(dim=1) + prior, math.inf)

    value = cost(a, b)
    for _ in range(_MAX_STEPS):
        p = (a[:, None] * z + b[:, None]).sigmoid()
        residual = p - y
        slope_a = (residual * z).sum(dim=1) + PRIOR * (1 - 1 / a)
        slope_b = residual.sum(dim=1) + b
        spread = p * (1 - p)
        aa = (spread * z**2).sum(dim=1) + PRIOR / a**2
        ab = (spread * z).sum(dim=1)
        bb = spread.sum(dim=1) + 1
        determinant = aa * bb - ab**2
        step_a = (ab * slope_b - bb * slope_a) / determinant
        step_b = (ab * slope_a - aa * slope_b) / determinant
        size = torch.ones_like(a)
        for _ in range(40):  # halve the step of a label until its cost does not increase
            trial = cost(a + size * step_a, b + size * step_b)
            is_worse = ~(trial <= value + 1e-12 * value.abs())
            if not is_worse.any():
                break
            size = torch.where(is_worse, size / 2, size)
        size = torch.where(is_worse, 0.0, size)
        a = a + size * step_a
        b = b + size * step_b
        value = cost(a, b)
        if float((size * (step_a.abs() + step_b.abs())).max()) < 1e-12:
            break
    return a, b
