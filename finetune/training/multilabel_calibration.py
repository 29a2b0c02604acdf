"""Calibration for several labels an image: probabilities and decisions for each label, fitted on the validation split.

Everything is computed from the counts of `logit_histogram`, so that it is the same on any number of devices.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from finetune.system.messages import counted
from finetune.training.logit_histogram import LogitHistogram, bin_centres, histogram, logit_at
from finetune.training.precision import double
from finetune.training.stored_values import number, refuse, table, whole
from finetune.training.temperature import HIGHEST, LOWEST, PRIOR
from finetune.training.threshold import (
    MEASURES,
    RATES,
    Candidates,
    LabelAim,
    choose_among,
)

# Shapes: B images, K labels, J bins of logits.

# With fewer positives or negatives among the validation images, a label's own best threshold is a matter of luck.
LEAST_TO_CHOOSE = 10
DEFAULT_AIM = LabelAim("f1")
NUM_RELIABILITY_BINS = 15
_MAX_BIAS = 16.0
_MAX_STEPS = 100  # of Newton's method; about eight are needed
_MOST_SHOWN = 8  # labels in a line

Array = np.ndarray


class MultilabelCalibration(NamedTuple):
    """How logits become probabilities and decisions: for each label a scale, a bias and a threshold.

    Attributes:
        scale: The logits of each label are multiplied by it, K of them.
        bias: It is then added to them, K.
        thresholds: An image has a label if its probability is at least this, K.
        num_images: Number of validation images that it was fitted on; 0 if nothing was fitted.
        aim: What the thresholds were requested for; None for the default, the highest F1.
        unreached: Indices of the labels whose threshold misses the aim: the best common one if they have few images,
            or the default one if none reaches the aim.
    """

    scale: tuple[float, ...]
    bias: tuple[float, ...]
    thresholds: tuple[float, ...]
    num_images: int = 0
    aim: LabelAim | None = None
    unreached: tuple[int, ...] = ()

    @classmethod
    def unfitted(cls, num_classes: int) -> "MultilabelCalibration":
        """Return the calibration of a network that is not calibrated: plain sigmoids and thresholds of 1/2."""
        return cls((1.0,) * num_classes, (0.0,) * num_classes, (0.5,) * num_classes)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each label (B, K) in float64 from logits (B, K)."""
        z = double(logits)
        return (z * z.new_tensor(self.scale) + z.new_tensor(self.bias)).sigmoid()

    def decide(self, probabilities: Tensor) -> Tensor:
        """Return for each image which labels it has, (B, K) bool, from probabilities (B, K)."""
        return probabilities >= probabilities.new_tensor(self.thresholds)

    def describe(self, class_names: Sequence[str]) -> list[str]:
        """Return the calibration and the thresholds in words, a line for each."""
        if not self.num_images:
            return [
                "no calibration: nothing was validated, so the probabilities are not calibrated and the thresholds 0.5"
            ]
        images = counted(self.num_images, "validation image")
        scale = f"scale {min(self.scale):.2f} to {max(self.scale):.2f}"
        lines = [f"calibration of each label, fitted on {images}: {scale}"]
        shown = [
            f"{name} {value:.3f}" for name, value in zip(class_names, self.thresholds, strict=True)
        ]
        more = f" and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
        aim = "the highest f1" if self.aim is None else _words(self.aim)
        lines.append(f"thresholds for {aim}: {', '.join(shown[:_MOST_SHOWN])}{more}")
        if missed := self.describe_unreached_aim(class_names):
            few = f"with fewer than {LEAST_TO_CHOOSE} images with or without a label the best common one"
            lines.append(f"{missed}; there it is the threshold for the highest f1, {few}")
        return lines

    def describe_unreached_aim(self, class_names: Sequence[str]) -> str:
        """Return in words for which labels the aim is not reached; "" if it is for each."""
        if self.aim is None or not self.unreached:
            return ""
        names = [class_names[k] for k in self.unreached]
        more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
        return f"{_words(self.aim)} is not reached for {', '.join(names[:_MOST_SHOWN])}{more}"

    def as_plain(self) -> dict[str, Any] | None:
        """Return plain values for checkpoints and test.json; None if nothing was fitted."""
        if not self.num_images:
            return None
        return {
            "scale": list(self.scale),
            "bias": list(self.bias),
            "thresholds": list(self.thresholds),
            "num_pictures": self.num_images,
            "aim": None if self.aim is None else self.aim._asdict(),
            "unreached": list(self.unreached),
        }


class MultilabelCalibrator(nn.Module):
    """Fits a calibration on the validation images of all ranks. Each rank gets the same result.

    Attributes:
        aim: What the thresholds are chosen for; None for the highest F1.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.aim: LabelAim | None = None
        self.histogram = LogitHistogram(num_classes)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add images: logits and labels (B, K)."""
        self.histogram.update(logits, labels)

    def take(self) -> MultilabelCalibration:
        """Return the calibration for the images of all ranks, and reset."""
        counts = self.histogram.compute()
        self.histogram.reset()
        return calibration_of(counts, self.aim)


def fit_multilabel_calibration(
    logits: Tensor, labels: Tensor, aim: LabelAim | None
) -> MultilabelCalibration:
    """Return the calibration for images of this process alone, from logits and labels (B, K)."""
    return calibration_of(histogram(logits, labels), aim)


def calibration_of(counts: Tensor, aim: LabelAim | None) -> MultilabelCalibration:
    """Return the calibration for counts of negatives and positives by label and bin, (2, K, J)."""
    negatives, positives = counts.cpu().numpy()
    if int(counts[:, 0].sum()) == 0:
        return MultilabelCalibration.unfitted(positives.shape[0])
    scale, bias = fit_scale_and_bias(negatives, positives)
    return _with_thresholds(counts, scale, bias, aim)


def choose_thresholds(
    probabilities: Tensor, labels: Tensor, aim: LabelAim | None
) -> MultilabelCalibration:
    """Return a calibration that leaves calibrated probabilities as they are, and has thresholds for them.

    Args:
        probabilities: Calibrated probability of each label, (N, K).
        labels: Whether each image has each label, (N, K).
        aim: What the thresholds are chosen for; None for the highest F1.
    """
    num_classes = labels.shape[1]
    counts = histogram(probabilities.logit(), labels)
    return _with_thresholds(counts, np.ones(num_classes), np.zeros(num_classes), aim)


def _with_thresholds(
    counts: Tensor, scale: Array, bias: Array, aim: LabelAim | None
) -> MultilabelCalibration:
    """Return the calibration with this scale and bias of each label (K,), and thresholds chosen for an aim."""
    negatives, positives = counts.cpu().numpy()
    default = _thresholds(negatives, positives, scale, bias, DEFAULT_AIM)
    wanted = default if aim is None else _thresholds(negatives, positives, scale, bias, aim)
    thresholds = [
        own if own is not None else other for own, other in zip(wanted, default, strict=True)
    ]
    unreached = [
        k
        for k, own in enumerate(wanted)
        if aim is not None
        and (own is None or not _reaches((negatives[k], positives[k]), scale[k], bias[k], own, aim))
    ]
    return MultilabelCalibration(
        scale=tuple(scale.tolist()),
        bias=tuple(bias.tolist()),
        thresholds=tuple(0.5 if value is None else value for value in thresholds),
        num_images=int(counts[:, 0].sum()),
        aim=aim,
        unreached=tuple(unreached),
    )


def fit_scale_and_bias(negatives: Array, positives: Array) -> tuple[Array, Array]:
    """Return scale a and bias b of each label (K,), with the lowest sum of -log p(label) for p = sigmoid(a z + b).

    If all predictions are right, a would be infinite. Priors keep the label near a = 1 and b = 0 if there are few
    images: as for a temperature, `PRIOR` * (a - 1 - log a) is added to the sum, and b ** 2 / 2. The sum is convex, and
    Newton's method finds its minimum. Logits are those in the middle of their bins.

    Args:
        negatives: Number of images without the label by bin, (K, J).
        positives: Number of images with it, (K, J).

    Source: Platt 1999, "Probabilistic outputs for support vector machines".
    """
    used = np.flatnonzero((negatives + positives).any(axis=0))
    z = torch.from_numpy(bin_centres()[used])
    positive = torch.from_numpy(positives[:, used]).double()
    both = positive + torch.from_numpy(negatives[:, used]).double()
    a = torch.ones(len(positive), dtype=torch.float64)
    b = torch.zeros(len(positive), dtype=torch.float64)

    def cost(a: Tensor, b: Tensor) -> Tensor:
        logits = a[:, None] * z + b[:, None]
        losses = both * nn.functional.softplus(logits) - positive * logits
        prior = PRIOR * (a - 1 - a.clamp_min(1e-300).log()) + b**2 / 2
        return torch.where(a > 0, losses.sum(dim=1) + prior, math.inf)

    value = cost(a, b)
    for _ in range(_MAX_STEPS):
        p = (a[:, None] * z + b[:, None]).sigmoid()
        residual = both * p - positive
        slope_a = (residual * z).sum(dim=1) + PRIOR * (1 - 1 / a)
        slope_b = residual.sum(dim=1) + b
        spread = both * p * (1 - p)
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
    return a.clamp(LOWEST, HIGHEST).numpy(), b.clamp(-_MAX_BIAS, _MAX_BIAS).numpy()


def label_calibration_errors(
    counts: Tensor, calibration: MultilabelCalibration
) -> dict[str, list[float]]:
    """Return the calibration error of the probabilities of each label, K numbers each, by name.

    `error` is the expected calibration error over 15 equal bins of probability, and `error_before_scaling` that of the
    plain sigmoids, if a calibration was fitted. `error_by_chance` estimates the `error` that correct probabilities
    would have: with few images, shares differ from probabilities by chance. Logits are those in the middle of their
    bins.

    Args:
        counts: Negatives and positives by label and bin of logits, (2, K, J).
        calibration: The calibration.

    Source: Guo et al. 2017 (arXiv:1706.04599), section 2.
    """
    negatives, positives = counts.cpu().double().numpy()
    centres = torch.from_numpy(bin_centres()).expand(len(positives), -1)
    calibrated = calibration.probabilities(centres.T).T.numpy()
    errors = {"error": _errors_of(calibrated, negatives, positives)}
    if calibration.num_images:
        errors["error_before_scaling"] = _errors_of(centres.sigmoid().numpy(), negatives, positives)
    # The mean absolute deviation of a sum with the variance v: sqrt(2 v / pi) if it is normal, 2 v for one image.
    variances = _sums_in_bins(calibrated, (negatives + positives) * calibrated * (1 - calibrated))
    deviations = np.minimum(np.sqrt(2 / math.pi * variances), 2 * variances)
    errors["error_by_chance"] = deviations.sum(axis=1) / _num_images(negatives, positives)
    return {name: values.tolist() for name, values in errors.items()}


def _errors_of(probabilities: Array, negatives: Array, positives: Array) -> Array:
    """Return the expected calibration error of each label, (K,), from arrays of (K, J)."""
    differences = (negatives + positives) * probabilities - positives
    in_bins = np.abs(_sums_in_bins(probabilities, differences))
    return in_bins.sum(axis=1) / _num_images(negatives, positives)


def _num_images(negatives: Array, positives: Array) -> int:
    return max(1, int((negatives[0] + positives[0]).sum()))


def _sums_in_bins(probabilities: Array, values: Array) -> Array:
    """Return the sums of values (K, J) over equal bins of their probabilities, (K, NUM_RELIABILITY_BINS)."""
    num_labels = len(probabilities)
    bins = (probabilities * NUM_RELIABILITY_BINS).astype(np.int64).clip(0, NUM_RELIABILITY_BINS - 1)
    flat = bins + np.arange(num_labels)[:, None] * NUM_RELIABILITY_BINS
    sums = np.bincount(flat.ravel(), values.ravel(), num_labels * NUM_RELIABILITY_BINS)
    return sums.reshape(num_labels, NUM_RELIABILITY_BINS)


def _thresholds(
    negatives: Array, positives: Array, scale: Array, bias: Array, aim: LabelAim
) -> list[float | None]:
    """Return the threshold of each label for an aim, K; None where none reaches it.

    A label with few positives or negatives has the threshold that is best for all labels together.
    """
    num_of_rarer_kind = np.minimum(positives.sum(axis=1), negatives.sum(axis=1))
    has_enough = num_of_rarer_kind >= LEAST_TO_CHOOSE
    shared = None
    if not has_enough.all():
        shared = _shared_threshold(negatives, positives, scale, bias, aim)
    thresholds: list[float | None] = []
    for k in range(len(scale)):
        if has_enough[k]:
            candidates = _candidates(negatives[k], positives[k], float(scale[k]), float(bias[k]))
            thresholds.append(choose_among(candidates, aim.measure, aim.least).value)
        else:
            thresholds.append(shared)
    return thresholds


def _reaches(
    counts: tuple[Array, Array], scale: float, bias: float, threshold: float, aim: LabelAim
) -> bool:
    """Return whether a threshold reaches an aim for a label; true if no image has the label.

    Args:
        counts: Number of images without and with the label by bin, (J,) each.
        scale: As in `MultilabelCalibration`.
        bias: As in `MultilabelCalibration`.
        threshold: The threshold of the label.
        aim: The aim.
    """
    negatives, positives = counts
    if aim.least is None or not positives.any():
        return True
    is_predicted = _sigmoid(scale * bin_centres() + bias) >= threshold
    num_hits = positives[is_predicted].sum()
    num_predicted = num_hits + negatives[is_predicted].sum()
    total = positives.sum() if aim.measure == "recall" else max(num_predicted, 1)
    return bool(num_hits / total >= aim.least)


def _candidates(negatives: Array, positives: Array, scale: float, bias: float) -> Candidates:
    """Return the thresholds between neighbouring bins with images, and below the lowest.

    Args:
        negatives: Number of images without a label by bin, (J,).
        positives: Number of images with it, (J,).
        scale: As in `MultilabelCalibration`.
        bias: As in `MultilabelCalibration`.
    """
    used = np.flatnonzero(positives + negatives)[::-1]  # from the highest logit
    num_hits = positives[used].cumsum()
    num_predicted = (positives + negatives)[used].cumsum()
    # halfway between the lower edge of a bin and the upper edge of the next one with images
    below = np.append(used[1:] + 1, used[-1])
    logits = scale * logit_at((used + below) / 2) + bias
    return Candidates(
        values=_sigmoid(logits),
        num_hits=num_hits,
        num_predicted=num_predicted,
        num_positive=int(positives.sum()),
        num_images=int((positives + negatives).sum()),
    )


def _shared_threshold(
    negatives: Array, positives: Array, scale: Array, bias: Array, aim: LabelAim
) -> float | None:
    """Return the best threshold if all labels had the same one, by all pairs of image and label; None for none."""
    if not positives.any() or not negatives.any():
        return 0.5
    p = _sigmoid(scale[:, None] * bin_centres() + bias[:, None]).ravel()
    used = np.flatnonzero((positives + negatives).ravel())
    used = used[np.argsort(-p[used], kind="stable")]
    of_bin = p[used]
    is_last = np.append(of_bin[1:] < of_bin[:-1], True)  # no threshold is between equal ones
    below = np.append(of_bin[1:], 0.0)
    candidates = Candidates(
        values=((of_bin + below) / 2)[is_last],
        num_hits=positives.ravel()[used].cumsum()[is_last],
        num_predicted=(positives + negatives).ravel()[used].cumsum()[is_last],
        num_positive=int(positives.sum()),
        num_images=int((positives + negatives).sum()),
    )
    return choose_among(candidates, aim.measure, aim.least).value


def _sigmoid(logits: Array) -> Array:
    return torch.from_numpy(np.ascontiguousarray(logits)).sigmoid().numpy()


def _words(aim: LabelAim) -> str:
    return aim.measure if aim.least is None else f"{aim.measure} {aim.least:g}"


def read_multilabel_calibration(
    stored: Mapping[str, Any] | None, num_classes: int
) -> MultilabelCalibration:
    """Return the calibration of a checkpoint from its plain values, which may be untrusted.

    Args:
        stored: The result of `as_plain`.
        num_classes: K.

    Raises:
        ValueError: A value has a wrong type or range.
    """
    if stored is None:
        return MultilabelCalibration.unfitted(num_classes)
    names = ("scale", "bias", "thresholds", "num_pictures", "aim", "unreached")
    fields = table(stored, "calibration", names)
    aim = None
    if fields["aim"] is not None:
        plain = table(fields["aim"], "aim", LabelAim._fields)
        measure = plain["measure"]
        if type(measure) is not str or measure not in MEASURES:
            refuse("measure", measure)
        if (plain["least"] is None) != (measure not in RATES):
            refuse("least", plain["least"])
        least = None if plain["least"] is None else number(plain["least"], "least", 0.0, 1.0)
        aim = LabelAim(measure, least)
    unreached = fields["unreached"]
    if type(unreached) is not list or len(unreached) > num_classes:
        refuse("unreached", unreached)
    return MultilabelCalibration(
        scale=_numbers(fields["scale"], "scale", (LOWEST, HIGHEST), num_classes),
        bias=_numbers(fields["bias"], "bias", (-_MAX_BIAS, _MAX_BIAS), num_classes),
        thresholds=_numbers(fields["thresholds"], "thresholds", (0.0, 1.0), num_classes),
        num_images=whole(fields["num_pictures"], "num_pictures", 2**53),
        aim=aim,
        unreached=tuple(whole(k, "unreached", num_classes - 1, least=0) for k in unreached),
    )


def _numbers(
    values: Any, name: str, bounds: tuple[float, float], num_classes: int
) -> tuple[float, ...]:
    if type(values) is not list or len(values) != num_classes:
        refuse(name, values)
    return tuple(number(value, name, *bounds) for value in values)
