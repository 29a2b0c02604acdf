"""Calibration: how logits become probabilities and decisions. It is fitted on the validation split and saved.

Of one class an image, the logits of all classes have the same scale, 1 / temperature. Of several labels, each has a
scale, a bias and a threshold.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor, nn

from finetune.settings.schema import LabelKind
from finetune.system.messages import counted
from finetune.training.precision import double
from finetune.training.prediction_sets import (
    MOST_SCORES,
    check_enough,
    describe_sets,
    kept,
    limit,
    set_scores,
)
from finetune.training.threshold import Aim, choose

# Shapes: N images, K classes or labels.

# Fitted temperatures of good networks are between 0.5 and 5 (Guo et al., table 4). Beyond these bounds of a scale
# probabilities are practically 0 and 1, or all the same.
LOWEST = 1 / 16
HIGHEST = 16.0
MOST_BIAS = 16.0
Scores = Annotated[tuple[Annotated[float, Meta(ge=0, le=1)], ...], Meta(max_length=MOST_SCORES)]
# Weight of the prior, in images. Compared with 1 it lowers the loss of other images by 0.03 if 6 images were fitted, by
# 0.02 for 8, and by nothing for 12 or more (docs/decisions.md).
PRIOR = 3
DEFAULT_AIM = Aim("f1")  # of several labels
# With fewer positives or negatives among the validation images, a label's own best threshold is a matter of luck.
LEAST_TO_CHOOSE = 10
_MOST_SHOWN = 8  # labels in a line
_MAX_STEPS = 100  # of Newton's method; about eight are needed
_CHUNK = 2**22  # logits that are fitted at once: some 100 MB
# Rounding in batches of another size (float32) changes a probability by a smaller share. With it, the image that
# decides a limit stays in its set.
_ROUNDING = 1e-5
_MOST_LOGIT = 1e4  # of several labels; beyond it a label is certain

Array = np.ndarray


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How logits become probabilities and decisions. Checkpoints have its fields as plain values.

    Attributes:
        label_kind: Whether images have one class or several labels.
        scale: The logits of each label are multiplied by it, K of them; of one class an image one number for all.
        bias: It is then added to them, of the same length.
        thresholds: An image has a label if its probability is at least this, K. Of two classes one number, for the
            class of the aim; if there is none, the most probable class is predicted.
        num_images: Number of validation images that it was fitted on; 0 if nothing was fitted.
        aim: What the thresholds were requested for; None for the most probable class, and for the highest F1.
        reached: Of two classes the measure at the threshold, or its largest value if no threshold reaches the aim; None
            if all images had the same class.
        unreached: Indices of the labels whose threshold misses the aim: the best common one if they have few images,
            or the default one if none reaches the aim.
        scores: Of validation images, for `prediction_sets`: of all classes, or of each of several labels.
    """

    label_kind: LabelKind
    scale: tuple[Annotated[float, Meta(ge=LOWEST, le=HIGHEST)], ...]
    bias: tuple[Annotated[float, Meta(ge=-MOST_BIAS, le=MOST_BIAS)], ...]
    thresholds: tuple[Annotated[float, Meta(ge=0, le=1)], ...] = ()
    num_images: Annotated[int, Meta(ge=0, le=2**53)] = 0
    aim: Aim | None = None
    reached: Annotated[float, Meta(ge=0, le=1)] | None = None
    unreached: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    scores: tuple[Scores, ...] = ()

    @classmethod
    def unfitted(cls, label_kind: LabelKind, num_classes: int) -> "Calibration":
        """Return the calibration of a network that is not calibrated: a softmax, or sigmoids with thresholds 1/2."""
        if label_kind == "single":
            return cls(label_kind, (1.0,), (0.0,))
        return cls(label_kind, (1.0,) * num_classes, (0.0,) * num_classes, (0.5,) * num_classes)

    @classmethod
    def fit(cls, logits: Tensor, labels: Tensor, aim: Aim | None) -> "Calibration":
        """Return the calibration for images. Of one class an image, nothing is fitted if logits are not finite.

        Args:
            logits: (N, K), on the CPU.
            labels: Class indices (N,), or whether each image has each label (N, K).
            aim: What thresholds are chosen for; None for no threshold, and for the highest F1 of each of several
                labels.
        """
        if labels.ndim == 1:
            scale = fit_scale(logits, labels)
            if not math.isfinite(scale):
                return cls.unfitted("single", logits.shape[1])
            fitted = cls("single", (scale,), (0.0,), num_images=len(labels))
            num = max(1, _CHUNK // logits.shape[1])
            own = [
                set_scores(fitted.probabilities(z), "single").gather(1, y[:, None]).squeeze(1)
                for z, y in zip(logits.split(num), labels.split(num), strict=True)
            ]
            fitted = msgspec.structs.replace(fitted, scores=(kept(torch.cat(own)),))
            if aim is None:  # probabilities would take a multiple of the memory of the logits
                return fitted
        else:
            scales, biases = fit_scale_and_bias(logits, labels)
            fitted = cls("several", tuple(scales.tolist()), tuple(biases.tolist()))
            columns = set_scores(fitted.probabilities(logits), "several").T
            pairs = zip(columns, labels.T > 0, strict=True)
            scores = tuple(kept(column[has]) for column, has in pairs)
            fitted = msgspec.structs.replace(fitted, scores=scores)
        return fitted.with_thresholds(fitted.probabilities(logits).numpy(), labels.numpy(), aim)

    def with_thresholds(
        self, probabilities: Array, labels: Array, aim: Aim | None
    ) -> "Calibration":
        """Return the calibration with thresholds that are chosen for an aim.

        Args:
            probabilities: The calibrated probabilities, (N, K).
            labels: Class indices (N,), or whether each image has each label (N, K).
            aim: As in `fit`. Of one class an image, nothing changes without an aim.
        """
        found: dict[str, Any] = {"num_images": len(labels), "aim": aim}
        if self.label_kind == "several":
            thresholds, unreached = _thresholds_of_labels(aim, probabilities, labels > 0)
            found |= {"thresholds": thresholds, "unreached": unreached}
        elif aim is None or aim.positive is None:
            return self
        else:
            value, reached = choose(aim, probabilities[:, aim.positive], labels == aim.positive)
            found |= {"thresholds": () if value is None else (value,), "reached": reached}
        return msgspec.structs.replace(self, **found)

    @property
    def temperature(self) -> float:
        """By which the logits of all classes are divided, of one class an image."""
        return 1 / self.scale[0]

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each class or label (N, K) in float64 from logits (N, K)."""
        z = double(logits)
        if self.label_kind == "single":
            return (z * self.scale[0]).softmax(dim=1)
        return (z * z.new_tensor(self.scale) + z.new_tensor(self.bias)).sigmoid()

    def decide(self, probabilities: Tensor) -> Tensor:
        """Return the index of each image's class (N,), or whether it has each label (N, K) bool.

        Args:
            probabilities: (N, K).
        """
        if self.label_kind == "several":
            return probabilities >= probabilities.new_tensor(self.thresholds)
        if not self.thresholds or self.aim is None or self.aim.positive is None:
            return probabilities.argmax(dim=1)
        positive = self.aim.positive
        is_positive = probabilities[:, positive] >= self.thresholds[0]
        return torch.where(is_positive, positive, 1 - positive)

    def check_coverage(self, coverage: float) -> None:
        """Raise a ValueError if there are too few validation images for prediction sets of a coverage."""
        check_enough(coverage, max(map(len, self.scores), default=0), self.label_kind)

    def in_sets(self, probabilities: Tensor, coverage: float) -> Tensor:
        """Return whether each class is in the prediction set of an image, (N, K).

        Args:
            probabilities: (N, K).
            coverage: The share of the sets that are to have the true class.
        """
        limits = probabilities.new_tensor([limit(scores, coverage) for scores in self.scores])
        # The rounding of a score is relative to what it leaves of 1.
        rounding = _ROUNDING * (1 - limits).clamp(min=0)
        return set_scores(probabilities, self.label_kind) <= limits + rounding

    def sets(self, probabilities: Tensor, coverage: float) -> list[list[int]]:
        """Return the prediction set of each image, the most probable class first; see `in_sets`."""
        orders = probabilities.argsort(dim=1, descending=True, stable=True).tolist()
        rows = zip(orders, self.in_sets(probabilities, coverage).tolist(), strict=True)
        return [[k for k in order if is_in[k]] for order, is_in in rows]

    def without_scaling(self) -> "Calibration":
        """Return what is left of it for logits that are calibrated already: the thresholds."""
        num = len(self.scale)
        return msgspec.structs.replace(self, scale=(1.0,) * num, bias=(0.0,) * num)

    def describe(self, class_names: Sequence[str], coverage: float | None = None) -> list[str]:
        """Return the calibration, the thresholds and the coverage of prediction sets in words, a line for each."""
        if not self.num_images:
            return ["not calibrated: nothing was validated"]
        images = counted(self.num_images, "validation image")
        missed = self.describe_unreached_aim(class_names)
        if self.label_kind == "several":
            names = zip(class_names, self.thresholds, strict=True)
            shown = _some([f"{name} {value:.3f}" for name, value in names])
            scale = f"scale {min(self.scale):.2f} to {max(self.scale):.2f}"
            lines = [
                f"calibration of each label, fitted on {images}: {scale}",
                f"thresholds for {self.aim or 'the highest f1'}: {shown}",
            ]
            few = f"with fewer than {LEAST_TO_CHOOSE} images with or without a label the best common one"
            instead = f"there it is the threshold for the highest f1, {few}"
        else:
            lines = [f"temperature {self.temperature:.3f}, fitted on {images}"]
            instead = "the more probable class is predicted"
            if self.thresholds and self.aim is not None and self.aim.positive is not None:
                name = class_names[self.aim.positive]
                measured = f"{self.aim.measure} {self.reached:.3f} on {images}"
                lines.append(f"threshold {_digits(self.thresholds[0])} for {name}: {measured}")
        lines += [f"{missed}; {instead}"] if missed else []
        if coverage is not None:
            lines.append(describe_sets(self.scores, coverage, class_names))
        return lines

    def describe_unreached_aim(self, class_names: Sequence[str]) -> str:
        """Return in words that no threshold reaches the aim; "" if one does for each label, or if there is no aim."""
        if self.aim is None:
            return ""
        if self.label_kind == "several":
            names = [class_names[k] for k in self.unreached]
            return f"{self.aim} is not reached for {_some(names)}" if names else ""
        if self.thresholds or self.aim.positive is None:
            return ""
        images = counted(self.num_images, "validation image")
        if self.reached is None:
            return f"no threshold can be chosen on {images} of one class"
        return (
            f"no threshold reaches {self.aim} for {class_names[self.aim.positive]}: "
            f"the highest is {self.reached:.4g}, on {images}"
        )

    def as_plain(self) -> dict[str, Any] | None:
        """Return plain values for checkpoints and test.json; None if nothing was fitted."""
        return msgspec.json.decode(msgspec.json.encode(self)) if self.num_images else None


def read_calibration(checkpoint: Mapping[str, Any]) -> Calibration:
    """Return the calibration of a checkpoint, which may be untrusted.

    Raises:
        ValueError: A value has a wrong type or range, or the values do not fit each other or the network.
    """
    plain = checkpoint["finetune"].get("calibration")
    settings = checkpoint.get("hyper_parameters", {})
    kind = settings.get("label_kind", "single")
    num_classes = len(settings.get("class_names", ()))
    if plain is None:
        return Calibration.unfitted(kind, num_classes)
    try:
        scores = plain.get("scores", ()) if type(plain) is dict else ()
        # before they are copied: one list may occur any number of times in a small file
        num_expected = (0, 1 if kind == "single" else num_classes)
        if type(scores) not in (list, tuple) or len(scores) not in num_expected:
            raise msgspec.ValidationError(f"the scores are not those of {num_classes} classes")
        calibration = msgspec.convert(plain, Calibration)
        _check_fits(calibration, kind, num_classes)
    except msgspec.ValidationError as error:
        reason = str(error)[:80]
        raise ValueError(
            f"the checkpoint is not as `finetune fit` writes them: in its calibration, {reason}"
        ) from error
    return calibration


def _check_fits(calibration: Calibration, kind: LabelKind, num_classes: int) -> None:
    """Check that a calibration is that of a network, and that its values fit each other.

    Raises:
        ValidationError: They do not.
    """
    is_single = kind == "single"
    thresholds = calibration.thresholds
    lengths = {len(calibration.scale), len(calibration.bias)}
    if not is_single or thresholds:
        lengths.add(len(thresholds))
    if calibration.label_kind != kind or lengths != {1 if is_single else num_classes}:
        raise msgspec.ValidationError(f"the values are not those of {num_classes} classes")
    if any(k >= num_classes for k in calibration.unreached):
        raise msgspec.ValidationError("there is no such label")
    aim = calibration.aim
    if is_single and aim is not None and (aim.positive is None or num_classes != 2):
        raise msgspec.ValidationError("the threshold is not one of two classes")
    if is_single and thresholds and (aim is None or calibration.reached is None):
        raise msgspec.ValidationError("the threshold has no aim")


def _thresholds_of_labels(
    aim: Aim | None, probabilities: Array, has_label: Array
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return the threshold of each label, K, and the indices of the labels whose threshold misses the aim.

    A label with few positives or negatives has the threshold that is best for all labels together. Where none reaches
    the aim, the threshold is that for the highest F1.
    """
    num_positive = has_label.sum(axis=0)
    has_enough = np.minimum(num_positive, len(has_label) - num_positive) >= LEAST_TO_CHOOSE
    wanted = aim or DEFAULT_AIM
    shared: dict[Aim, float | None] = {}
    if not has_enough.all():
        for each in {wanted, DEFAULT_AIM}:
            shared[each] = choose(each, probabilities.ravel(), has_label.ravel()).value
    if has_label.all() or not has_label.any():
        shared[wanted] = 0.5
    thresholds = []
    unreached = []
    for k in range(len(has_enough)):
        p = probabilities[:, k]
        is_positive = has_label[:, k]
        by_aim = shared
        if has_enough[k]:
            by_aim = {each: choose(each, p, is_positive).value for each in (wanted, DEFAULT_AIM)}
        own = by_aim[wanted]
        if own is None or not wanted.is_reached(p >= own, is_positive):
            unreached.append(k)
        value = by_aim[DEFAULT_AIM] if own is None else own
        thresholds.append(0.5 if value is None else value)
    return tuple(thresholds), tuple(unreached)


def fit_scale(logits: Tensor, labels: Tensor) -> float:
    """Return the scale b = 1 / temperature with the lowest sum of -log softmax(b * logits)[label].

    The sum is convex in b, and SciPy finds where its slope is zero. Class weights and label smoothing are not used.

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
    from scipy.optimize import brentq  # takes long to import

    lowest = _slope(LOWEST, logits, labels)
    highest = _slope(HIGHEST, logits, labels)
    if math.isnan(lowest + highest):
        return math.nan
    if lowest >= 0:
        return LOWEST
    if highest <= 0:
        return HIGHEST
    return float(brentq(_slope, LOWEST, HIGHEST, args=(logits, labels), xtol=1e-13))


def _slope(b: float, logits: Tensor, labels: Tensor) -> float:
    """Return the derivative by b of the sum of losses and prior in `fit_scale`; NaN if logits are not finite.

    For an image it is the mean of the logits under the softmax, minus the label's logit.
    """
    slope = PRIOR * (1 - 1 / b)
    num = max(1, _CHUNK // logits.shape[1])
    for rows, of_rows in zip(logits.split(num), labels.split(num), strict=True):
        # Logits of -inf are clamped: their probability is 0, but 0 * -inf would be NaN.
        z = rows.double()
        z = (z - z.amax(dim=1, keepdim=True)).clamp_min(torch.finfo(torch.float32).min)
        mean = ((b * z).softmax(dim=1) * z).sum(dim=1)
        slope += float((mean - z.gather(1, of_rows[:, None]).squeeze(1)).sum())
    return slope if math.isfinite(slope) else math.nan


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


def _some(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(names[:_MOST_SHOWN]) + more


def _digits(probability: float) -> str:
    """Return a threshold with three decimals; with more next to 0 or 1, where three would hide it."""
    return f"{probability:.3f}" if 0.001 <= probability <= 0.999 else f"{probability:.6g}"
