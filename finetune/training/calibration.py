"""Calibration: probabilities and decisions from logits. It is fitted on the validation split and saved.

Of one class an image, the logits of all classes have the same scale, 1 / temperature. Of several labels, each has a
scale, a bias and a threshold.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from finetune.data.mirror import original
from finetune.settings.schema import LabelKind
from finetune.system.messages import counted, shown
from finetune.training.precision import double
from finetune.training.stored_values import number, refuse, table, whole
from finetune.training.threshold import MEASURES, RATES, Aim, choose, is_reached

# Shapes: N images, K classes or labels.

# Fitted temperatures of good networks are between 0.5 and 5 (Guo et al., table 4). Beyond these bounds of a scale
# probabilities are practically 0 and 1, or all the same.
LOWEST = 1 / 16
HIGHEST = 16.0
_MOST_BIAS = 16.0
# Weight of the prior, in images. Compared with 1 it lowers the loss of other images by 0.03 if 6 images were fitted, by
# 0.02 for 8, and by nothing for 12 or more (benchmarks/NOTEBOOK.md, "Which epoch is kept").
PRIOR = 3
# With fewer positives or negatives among the validation images, a label's own best threshold is a matter of luck.
LEAST_TO_CHOOSE = 10
DEFAULT_AIM = Aim("f1")  # of several labels
_MAX_STEPS = 100  # of Newton's method; about eight are needed
_CHUNK = 2**22  # logits that are fitted at once: some 100 MB
_MOST_LOGIT = 1e4  # of several labels; beyond it a label is certain
_MOST_SHOWN = 8  # labels in a line

Array = np.ndarray


class Calibration(NamedTuple):
    """How logits become probabilities and decisions.

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
    """

    label_kind: LabelKind
    scale: tuple[float, ...]
    bias: tuple[float, ...]
    thresholds: tuple[float, ...] = ()
    num_images: int = 0
    aim: Aim | None = None
    reached: float | None = None
    unreached: tuple[int, ...] = ()

    @classmethod
    def unfitted(cls, label_kind: LabelKind, num_classes: int) -> "Calibration":
        """Return the calibration of a network that is not calibrated: a softmax, or sigmoids with thresholds 1/2."""
        if label_kind == "single":
            return cls(label_kind, (1.0,), (0.0,))
        return cls(label_kind, (1.0,) * num_classes, (0.0,) * num_classes, (0.5,) * num_classes)

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

    def without_scaling(self) -> "Calibration":
        """Return what is left of it for logits that are calibrated already: the thresholds."""
        num = len(self.scale)
        return self._replace(scale=(1.0,) * num, bias=(0.0,) * num)

    def describe(self, class_names: Sequence[str]) -> list[str]:
        """Return the calibration and the thresholds in words, a line for each."""
        images = counted(self.num_images, "validation image")
        missed = self.describe_unreached_aim(class_names)
        if self.label_kind == "several":
            return self._describe_labels(class_names, images, missed)
        if not self.num_images:
            return [
                "no temperature: nothing was validated, so the probabilities are not calibrated"
            ]
        lines = [f"temperature {self.temperature:.3f}, fitted on {images}"]
        if missed:
            lines.append(f"{missed}; the more probable class is predicted")
        elif self.aim is not None and self.aim.positive is not None:
            threshold = (
                f"threshold {_digits(self.thresholds[0])} for {class_names[self.aim.positive]}"
            )
            lines.append(f"{threshold}: {self.aim.measure} {self.reached:.3f} on {images}")
        return lines

    def _describe_labels(self, class_names: Sequence[str], images: str, missed: str) -> list[str]:
        if not self.num_images:
            return [
                "no calibration: nothing was validated, so the probabilities are not calibrated and the thresholds 0.5"
            ]
        scale = f"scale {min(self.scale):.2f} to {max(self.scale):.2f}"
        thresholds = zip(class_names, self.thresholds, strict=True)
        aim = "the highest f1" if self.aim is None else str(self.aim)
        lines = [
            f"calibration of each label, fitted on {images}: {scale}",
            f"thresholds for {aim}: {_some([f'{name} {value:.3f}' for name, value in thresholds])}",
        ]
        if missed:
            few = f"with fewer than {LEAST_TO_CHOOSE} images with or without a label the best common one"
            lines.append(f"{missed}; there it is the threshold for the highest f1, {few}")
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
        if not self.num_images:
            return None
        return {
            "scale": list(self.scale),
            "bias": list(self.bias),
            "thresholds": list(self.thresholds),
            "num_pictures": self.num_images,
            "aim": None if self.aim is None else self.aim._asdict(),
            "reached": self.reached,
            "unreached": list(self.unreached),
        }


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
    low, high = LOWEST, HIGHEST
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
    return scale.clamp(LOWEST, HIGHEST), bias.clamp(-_MOST_BIAS, _MOST_BIAS)


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


class NotFinite(ValueError):
    """Probabilities of an image are not finite. NaN fails every comparison, so a predicted class would be arbitrary."""


def check_finite_rows(
    probabilities: Tensor, name_of: Callable[[int], object], source: object, precision: str
) -> None:
    """Check that all probabilities of a batch are finite.

    Args:
        probabilities: (B, K).
        name_of: Returns a name for the image in a row, such as its path.
        source: The checkpoint or exported file that computed them.
        precision: The precision of the computation.

    Raises:
        NotFinite: Some are not finite. The message names the checkpoint and the first such image.
    """
    is_finite = probabilities.isfinite().all(dim=1)
    if is_finite.all():
        return
    name = shown(name_of(int(is_finite.int().argmin())))
    others = int((~is_finite).sum()) - 1
    more = f" (and {others} more)" if others else ""
    hint = "" if precision in ("32-true", "64-true") else "try precision 32-true, or "
    raise NotFinite(
        f"cannot classify {name}{more}: {shown(source)} gives probabilities that are not finite numbers in precision "
        f"{precision}. Its weights may be damaged: {hint}take another checkpoint"
    )


def check_evaluated(probabilities: Tensor, indices: Tensor, trainer: Any) -> None:
    """Check in `validate`, `test` and `predict` that all probabilities of a batch are finite.

    In `fit` the loss is checked instead (`finetune.runs.model_checkpoint`).

    Args:
        probabilities: (B, K).
        indices: Index of each image in its split, (B,).
        trainer: The Trainer; its command and checkpoint are in the message.

    Raises:
        NotFinite: Some are not finite.
    """
    split = {"validate": "val", "test": "test", "predict": "predict"}.get(trainer.state.fn)
    if split is None:
        return

    def name_of(row: int) -> object:
        splits = getattr(trainer.datamodule, "splits", {})
        return (
            original(splits[split].paths[int(indices[row])])
            if split in splits
            else f"image {int(indices[row])}"
        )

    check_finite_rows(probabilities, name_of, trainer.ckpt_path or "the network", trainer.precision)


def read_calibration(checkpoint: Mapping[str, Any]) -> Calibration:
    """Return the calibration of a checkpoint, which may be untrusted.

    Raises:
        ValueError: A value has a wrong type or range.
    """
    stored = checkpoint["finetune"].get("calibration")
    settings = checkpoint.get("hyper_parameters", {})
    kind = settings.get("label_kind", "single")
    num_classes = len(settings.get("class_names", ()))
    if stored is None:
        return Calibration.unfitted(kind, num_classes)
    names = ("scale", "bias", "thresholds", "num_pictures", "aim", "reached", "unreached")
    fields = table(stored, "calibration", names)
    is_single = kind == "single"
    num = 1 if is_single else num_classes
    most_bias = 0.0 if is_single else _MOST_BIAS
    unreached = _list(fields["unreached"], "unreached", 0 if is_single else num)
    found = Calibration(
        label_kind=kind,
        scale=_numbers(fields["scale"], "scale", (LOWEST, HIGHEST), num),
        bias=_numbers(fields["bias"], "bias", (-most_bias, most_bias), num),
        thresholds=_numbers(
            fields["thresholds"], "thresholds", (0.0, 1.0), num, may_be_empty=is_single
        ),
        num_images=whole(fields["num_pictures"], "num_pictures", 2**53),
        aim=_read_aim(fields["aim"], kind, num_classes),
        reached=None
        if fields["reached"] is None
        else number(fields["reached"], "reached", 0.0, 1.0),
        unreached=tuple(whole(k, "unreached", num - 1, least=0) for k in unreached),
    )
    if is_single:
        # `choose` returns both, none (all images have one class), or `reached` alone if no threshold reaches `least`.
        has_threshold = bool(found.thresholds)
        may_miss = found.aim is not None and found.aim.least is not None
        is_odd = has_threshold != (found.reached is not None) and (has_threshold or not may_miss)
        if is_odd or (found.aim is None and found.reached is not None):
            refuse("thresholds", fields["thresholds"])
    elif found.reached is not None:
        refuse("reached", found.reached)
    return found


def _read_aim(stored: Any, kind: LabelKind, num_classes: int) -> Aim | None:
    if stored is None:
        return None
    fields = table(stored, "aim", Aim._fields)
    measure = fields["measure"]
    if type(measure) is not str or measure not in MEASURES:
        refuse("measure", measure)
    if (fields["least"] is None) != (measure not in RATES):
        refuse("least", fields["least"])
    least = None if fields["least"] is None else number(fields["least"], "least", 0.0, 1.0)
    if kind == "several":
        if fields["positive"] is not None:
            refuse("positive", fields["positive"])
        return Aim(measure, least)
    if num_classes != 2:
        refuse("threshold", "of other than two classes")
    return Aim(measure, least, whole(fields["positive"], "positive", 1, least=0))


def _list(values: Any, name: str, most: int) -> list[Any]:
    if type(values) is not list or len(values) > most:
        refuse(name, values)
    return values


def _numbers(
    values: Any, name: str, bounds: tuple[float, float], num: int, may_be_empty: bool = False
) -> tuple[float, ...]:
    """Return a list of `num` numbers."""
    if len(_list(values, name, num)) < num and not (may_be_empty and not values):
        refuse(name, values)
    return tuple(number(value, name, *bounds) for value in values)
