"""Calibration: how logits become probabilities and decisions. It is fitted on the validation split and saved.

Of one class an image, the logits of all classes have the same scale, 1 / temperature. Of several labels, each has a
scale, a bias and a threshold.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from finetune.settings.schema import LabelKind
from finetune.system.messages import counted
from finetune.training.precision import double
from finetune.training.threshold import RATES, Aim

# Shapes: N images, K classes or labels.

# Fitted temperatures of good networks are between 0.5 and 5 (Guo et al., table 4). Beyond these bounds of a scale
# probabilities are practically 0 and 1, or all the same.
LOWEST = 1 / 16
HIGHEST = 16.0
MOST_BIAS = 16.0
# With fewer positives or negatives among the validation images, a label's own best threshold is a matter of luck.
LEAST_TO_CHOOSE = 10
_MOST_SHOWN = 8  # labels in a line


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


_Share = Annotated[float, Meta(ge=0, le=1)]


class _StoredAim(msgspec.Struct, forbid_unknown_fields=True):
    measure: Literal["accuracy", "f1", "precision", "recall"]
    least: _Share | None
    positive: Annotated[int, Meta(ge=0, le=1)] | None


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    """The values of `Calibration.as_plain`."""

    scale: list[Annotated[float, Meta(ge=LOWEST, le=HIGHEST)]]
    bias: list[Annotated[float, Meta(ge=-MOST_BIAS, le=MOST_BIAS)]]
    thresholds: list[_Share]
    num_pictures: Annotated[int, Meta(ge=1, le=2**53)]
    aim: _StoredAim | None
    reached: _Share | None
    unreached: list[Annotated[int, Meta(ge=0)]]


def read_calibration(checkpoint: Mapping[str, Any]) -> Calibration:
    """Return the calibration of a checkpoint, which may be untrusted.

    Raises:
        ValueError: A value has a wrong type or range.
    """
    plain = checkpoint["finetune"].get("calibration")
    settings = checkpoint.get("hyper_parameters", {})
    kind = settings.get("label_kind", "single")
    num_classes = len(settings.get("class_names", ()))
    if plain is None:
        return Calibration.unfitted(kind, num_classes)
    try:
        stored = msgspec.convert(plain, _Stored)
    except msgspec.ValidationError as error:
        raise _not_ours(str(error)) from error
    if (wrong := _inconsistent_aim(stored.aim, kind, num_classes)) or (
        wrong := _inconsistent_values(stored, kind, num_classes)
    ):
        raise _not_ours(wrong)
    aim = stored.aim
    return Calibration(
        label_kind=kind,
        scale=tuple(stored.scale),
        bias=tuple(stored.bias),
        thresholds=tuple(stored.thresholds),
        num_images=stored.num_pictures,
        aim=None if aim is None else Aim(aim.measure, aim.least, aim.positive),
        reached=stored.reached,
        unreached=tuple(stored.unreached),
    )


def _not_ours(what: str) -> ValueError:
    return ValueError(
        f"the checkpoint is not as `finetune fit` writes them: in its calibration, {what[:80]}"
    )


def _inconsistent_aim(aim: _StoredAim | None, kind: LabelKind, num_classes: int) -> str:
    """Return what no fit writes together in an aim; "" if there is nothing."""
    if aim is None:
        return ""
    if (aim.least is None) != (aim.measure not in RATES):
        return f"{aim.measure} has the least value {aim.least}"
    if (aim.positive is None) != (kind == "several"):
        return f"the positive class is {aim.positive}"
    if kind == "single" and num_classes != 2:
        return "a threshold of other than two classes"
    return ""


def _inconsistent_values(stored: _Stored, kind: LabelKind, num_classes: int) -> str:
    """Return what no fit writes together; "" if there is nothing."""
    num = 1 if kind == "single" else num_classes
    lengths = {len(stored.scale), len(stored.bias)}
    if kind == "several" or stored.thresholds:
        lengths.add(len(stored.thresholds))
    if lengths != {num}:
        return f"a list has not {counted(num, 'value')}"
    if kind == "several":
        unreached = stored.unreached
        is_odd = (
            len(unreached) > num or any(k >= num for k in unreached) or stored.reached is not None
        )
        return "the aim is reached by other labels" if is_odd else ""
    # `choose` returns both, none (all images have one class), or `reached` alone if no threshold reaches `least`.
    has_threshold = bool(stored.thresholds)
    has_reached = stored.reached is not None
    may_miss = stored.aim is not None and stored.aim.least is not None
    is_odd = has_threshold != has_reached and (has_threshold or not may_miss)
    if is_odd or (stored.aim is None and has_reached):
        return "the threshold does not go with its aim"
    return "there are values of several labels" if stored.unreached or any(stored.bias) else ""


def _some(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(names[:_MOST_SHOWN]) + more


def _digits(probability: float) -> str:
    """Return a threshold with three decimals; with more next to 0 or 1, where three would hide it."""
    return f"{probability:.3f}" if 0.001 <= probability <= 0.999 else f"{probability:.6g}"
