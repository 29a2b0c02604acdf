"""Calibration: probabilities and decisions from logits. It is fitted on the validation split and saved."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from finetune.data.mirror import original
from finetune.system.messages import counted, shown
from finetune.training.multilabel_calibration import (
    MultilabelCalibration,
    read_multilabel_calibration,
)
from finetune.training.precision import double
from finetune.training.stored_values import number, refuse, table, whole
from finetune.training.temperature import HIGHEST, LOWEST, Temperature, fit_temperature
from finetune.training.threshold import MEASURES, RATES, Aim, Choice, choose

# Shapes: B images, K classes.


class Calibration(NamedTuple):
    """How logits become probabilities and decisions. The defaults stand for a network that is not calibrated.

    Attributes:
        temperature: The logits are divided by it.
        num_images: Number of validation images that it was fitted on; 0 if nothing was fitted.
        aim: What the threshold was chosen for; None if no threshold was requested.
        choice: The threshold that was chosen.
    """

    temperature: float = 1.0
    num_images: int = 0
    aim: Aim | None = None
    choice: Choice | None = None

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each class (B, K) in float64 from logits (B, K)."""
        return (double(logits) / self.temperature).softmax(dim=1)

    def decide(self, probabilities: Tensor) -> Tensor:
        """Return the index of the predicted class of each image (B,), from probabilities (B, K)."""
        if self.aim is None or self.choice is None or self.choice.value is None:
            return probabilities.argmax(dim=1)
        positive = self.aim.positive
        return torch.where(probabilities[:, positive] >= self.choice.value, positive, 1 - positive)

    def describe(self, class_names: list[str]) -> list[str]:
        """Return the temperature and the threshold in words, a line for each."""
        if not self.num_images:
            return [
                "no temperature: nothing was validated, so the probabilities are not calibrated"
            ]
        images = counted(self.num_images, "validation image")
        lines = [f"temperature {self.temperature:.3f}, fitted on {images}"]
        if missed := self.describe_unreached_aim(class_names):
            lines.append(f"{missed}; the more probable class is predicted")
        elif self.aim and self.choice and self.choice.value is not None:
            threshold = (
                f"threshold {_digits(self.choice.value)} for {class_names[self.aim.positive]}"
            )
            lines.append(f"{threshold}: {self.aim.measure} {self.choice.reached:.3f} on {images}")
        return lines

    def describe_unreached_aim(self, class_names: list[str]) -> str:
        """Return in words that no threshold reaches the aim; "" if one does, or if there is no aim."""
        if self.aim is None or self.choice is None or self.choice.value is not None:
            return ""
        images = counted(self.num_images, "validation image")
        if self.choice.reached is None:
            return f"no threshold can be chosen on {images} of one class"
        return (
            f"no threshold reaches {self.aim.measure} {self.aim.least:g} for {class_names[self.aim.positive]}: "
            f"the highest is {self.choice.reached:.4g}, on {images}"
        )

    def as_plain(self) -> dict[str, Any] | None:
        """Return plain values for checkpoints and test.json; None if nothing was fitted."""
        if not self.num_images:
            return None
        threshold = (
            {**self.aim._asdict(), **self.choice._asdict()} if self.aim and self.choice else None
        )
        return {
            "temperature": self.temperature,
            "num_pictures": self.num_images,
            "threshold": threshold,
        }


AnyCalibration = Calibration | MultilabelCalibration


class Calibrator(nn.Module):
    """Fits a calibration on the validation images of all ranks. Each rank gets the same result.

    Attributes:
        aim: What a threshold is chosen for; None for no threshold.
    """

    def __init__(self) -> None:
        super().__init__()
        self.aim: Aim | None = None
        self.temperature = Temperature()
        self._batches: list[
            tuple[np.ndarray, np.ndarray]
        ] = []  # logits and labels, for the threshold

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add images: logits (B, K) and class indices (B,). They are stored only if there is an aim."""
        self.temperature.update(logits, labels)
        if self.aim is not None:
            self._batches.append((double(logits).cpu().numpy(), labels.cpu().numpy()))

    def take(self) -> Calibration:
        """Return the calibration for the images of all ranks, and reset. Nothing is fitted if logits are not finite."""
        temperature = float(self.temperature.compute())
        with self.temperature.sync_context(should_sync=dist.is_initialized()):
            num_images = int(self.temperature.count)
        self.temperature.reset()
        batches = self._batches
        self._batches = []
        if not math.isfinite(temperature):
            return Calibration()
        calibration = Calibration(temperature, num_images)
        aim = self.aim
        if aim is None:
            return calibration
        if dist.is_initialized():
            of_ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, batches)
            batches = [batch for of_rank in of_ranks for batch in of_rank]
        logits, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        return _with_threshold(calibration, aim, torch.from_numpy(logits), labels)


def fit_calibration(logits: Tensor, labels: Tensor, aim: Aim | None) -> Calibration:
    """Return the calibration for images of this process alone. If logits are not finite, nothing is fitted.

    Args:
        logits: (B, K), on the CPU.
        labels: Class indices (B,).
        aim: What a threshold is chosen for; None for no threshold.
    """
    temperature = fit_temperature(logits, labels)
    if not math.isfinite(temperature):
        return Calibration()
    calibration = Calibration(temperature, len(labels))
    return calibration if aim is None else _with_threshold(calibration, aim, logits, labels.numpy())


def _with_threshold(
    calibration: Calibration, aim: Aim, logits: Tensor, labels: np.ndarray
) -> Calibration:
    p = calibration.probabilities(logits)[:, aim.positive].numpy()
    return calibration._replace(aim=aim, choice=choose(aim, p, labels == aim.positive))


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


def read_calibration(checkpoint: Mapping[str, Any]) -> AnyCalibration:
    """Return the calibration of a checkpoint, which may be untrusted.

    Raises:
        ValueError: A value has a wrong type or range.
    """
    stored = checkpoint["finetune"].get("calibration")
    settings = checkpoint.get("hyper_parameters", {})
    if settings.get("label_kind") == "several":
        return read_multilabel_calibration(stored, len(settings["class_names"]))
    return Calibration() if stored is None else _read_calibration(stored, settings["class_names"])


def _read_calibration(stored: Any, class_names: Sequence[str]) -> Calibration:
    fields = table(stored, "calibration", ("temperature", "num_pictures", "threshold"))
    temperature = number(fields["temperature"], "temperature", LOWEST, HIGHEST)
    num_images = whole(fields["num_pictures"], "num_pictures", 2**53)
    if fields["threshold"] is None:
        return Calibration(temperature, num_images)
    threshold = table(fields["threshold"], "threshold", (*Aim._fields, *Choice._fields))
    if type(threshold["measure"]) is not str or threshold["measure"] not in MEASURES:
        refuse("measure", threshold["measure"])
    if len(class_names) != 2:
        refuse("threshold", "of other than two classes")
    shares = {
        name: None if threshold[name] is None else number(threshold[name], name, 0.0, 1.0)
        for name in ("least", "value", "reached")
    }
    least = shares["least"]
    value = shares["value"]
    reached = shares["reached"]
    if (least is None) != (threshold["measure"] not in RATES):
        refuse("least", least)
    # `choose` returns both, none (all images have one class), or `reached` alone if no threshold reaches `least`.
    is_unreached = value is None and reached is not None and least is not None
    if (value is None) != (reached is None) and not is_unreached:
        refuse("value", value)
    positive = whole(threshold["positive"], "positive", 1, least=0)
    aim = Aim(threshold["measure"], least, positive)
    return Calibration(temperature, num_images, aim, Choice(value, reached))
