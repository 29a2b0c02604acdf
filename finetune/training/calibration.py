"""What makes probabilities and decisions of logits, fitted on the validation split and kept in the checkpoint."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from finetune.system.messages import shown
from finetune.training.precision import double
from finetune.training.temperature import HIGHEST, LOWEST, Temperature, fit_temperature
from finetune.training.threshold import MEASURES, RATES, Aim, Choice, choose

# Shapes: B pictures, K classes.


class Calibration(NamedTuple):
    """How a network's logits are read; without arguments as they are, where nothing was fitted.

    Attributes:
        temperature: By which logits are divided.
        num_pictures: Of the validation split, on which all this was fitted; 0 where nothing was.
        aim: What a threshold was chosen for; None where none was asked for.
        choice: What was found for it.
    """

    temperature: float = 1.0
    num_pictures: int = 0
    aim: Aim | None = None
    choice: Choice | None = None

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each class (B, K) in float64 from logits (B, K)."""
        return (double(logits) / self.temperature).softmax(dim=1)

    def decide(self, probabilities: Tensor) -> Tensor:
        """Return the index of the class that is said of each picture (B,), from probabilities (B, K)."""
        if self.aim is None or self.choice is None or self.choice.value is None:
            return probabilities.argmax(dim=1)
        positive = self.aim.positive
        return torch.where(probabilities[:, positive] >= self.choice.value, positive, 1 - positive)

    def told(self, class_names: list[str]) -> list[str]:
        """Return in words, line by line, what becomes of the logits."""
        if not self.num_pictures:
            return [
                "no temperature was fitted, for want of a validation: probabilities are the network's own"
            ]
        where = f"the {self.num_pictures} validation pictures"
        lines = [f"probabilities at temperature {self.temperature:.3f}, fitted on {where}"]
        if missed := self.missed(class_names):
            lines.append(f"{missed}; the more probable class is said")
        elif self.aim and self.choice:
            gives = f"{self.aim.measure} {self.choice.reached:.4g} on {where}"
            lines.append(
                f"{class_names[self.aim.positive]} is said from {self.choice.value:.6g} on, which gives {gives}"
            )
        return lines

    def missed(self, class_names: list[str]) -> str:
        """Return in words that no threshold does what was aimed at; "" where one does or none was sought."""
        if self.aim is None or self.choice is None or self.choice.value is not None:
            return ""
        if self.choice.reached is None:
            return f"no threshold can be chosen on {self.num_pictures} validation pictures of one class"
        return (
            f"no threshold gives {class_names[self.aim.positive]} a {self.aim.measure} of {self.aim.least:g}: the most "
            f"on the {self.num_pictures} validation pictures is {self.choice.reached:.4g}"
        )

    def as_plain(self) -> dict[str, Any] | None:
        """Return what checkpoints and test.json have of it; None where nothing was fitted."""
        if not self.num_pictures:
            return None
        threshold = (
            {**self.aim._asdict(), **self.choice._asdict()} if self.aim and self.choice else None
        )
        return {
            "temperature": self.temperature,
            "num_pictures": self.num_pictures,
            "threshold": threshold,
        }


class Calibrator(nn.Module):
    """Fits a calibration on all devices' validation pictures; each device gets the same.

    Attributes:
        aim: What a threshold is chosen for; None for none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.aim: Aim | None = None
        self.temperature = Temperature()
        self._kept: list[tuple[np.ndarray, np.ndarray]] = []

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add pictures: logits (B, K) and class indices (B,). Where there is an aim, all of them are kept."""
        self.temperature.update(logits, labels)
        if self.aim is not None:
            self._kept.append((double(logits).cpu().numpy(), labels.cpu().numpy()))

    def take(self) -> Calibration:
        """Return what fits the pictures of all devices, and start again; nothing where logits are not numbers."""
        temperature = float(self.temperature.compute())
        with self.temperature.sync_context(should_sync=dist.is_initialized()):
            num_pictures = int(self.temperature.count)
        self.temperature.reset()
        kept, self._kept = self._kept, []
        if not math.isfinite(temperature):
            return Calibration()
        calibration, aim = Calibration(temperature, num_pictures), self.aim
        if aim is None:
            return calibration
        if dist.is_initialized():
            everywhere: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, kept)
            kept = [part for parts in everywhere for part in parts]
        logits, labels = (np.concatenate(parts) for parts in zip(*kept, strict=True))
        return _with_threshold(calibration, aim, torch.from_numpy(logits), labels)


def fit_calibration(logits: Tensor, labels: Tensor, aim: Aim | None) -> Calibration:
    """Return what fits images that one process has, without asking others; nothing where logits are not numbers.

    Args:
        logits: (B, K), on the CPU.
        labels: Class indices (B,).
        aim: What a threshold is chosen for; None for none.
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


class NotFinite(ValueError):
    """Probabilities of an image are not finite numbers: NaN fails every comparison, so no class may be predicted."""


def check_finite_rows(
    probabilities: Tensor, name_of: Callable[[int], object], source: object, precision: str
) -> None:
    """Make sure that all probabilities (B, K) are finite numbers.

    Args:
        probabilities: Of a batch.
        name_of: Returns what to call the image in a row, such as its path.
        source: The checkpoint or exported file that computed them.
        precision: The precision in which it did.

    Raises:
        NotFinite: Some are not; the error names the checkpoint and the first such image.
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


def checked(probabilities: Tensor, indices: Tensor, trainer: Any) -> Tensor:
    """Return probabilities (B, K) of a batch, after a check in `validate`, `test` and `predict` that all are finite.

    In `fit` the loss is checked instead (`finetune.runs.model_checkpoint`).

    Raises:
        NotFinite: Some are not.
    """
    split = {"validate": "val", "test": "test", "predict": "predict"}.get(trainer.state.fn)
    if split is None:
        return probabilities

    def name_of(row: int) -> object:
        splits = getattr(trainer.datamodule, "splits", {})
        return (
            splits[split].paths[int(indices[row])]
            if split in splits
            else f"image {int(indices[row])}"
        )

    check_finite_rows(probabilities, name_of, trainer.ckpt_path or "the network", trainer.precision)
    return probabilities


def read_calibration(checkpoint: Mapping[str, Any]) -> Calibration:
    """Return the calibration of a checkpoint, which may be untrusted; checkpoints of earlier versions have none.

    Raises:
        ValueError: A value is not one that a fit writes.
    """
    found = checkpoint["finetune"].get("calibration")
    if found is None:
        return Calibration()
    known = _table(found, "calibration", ("temperature", "num_pictures", "threshold"))
    temperature = _number(known["temperature"], "temperature", LOWEST, HIGHEST)
    num_pictures = _whole(known["num_pictures"], "num_pictures", 2**53)
    if known["threshold"] is None:
        return Calibration(temperature, num_pictures)
    given = _table(known["threshold"], "threshold", (*Aim._fields, *Choice._fields))
    if type(given["measure"]) is not str or given["measure"] not in MEASURES:
        _refuse("measure", given["measure"])
    if len(checkpoint["hyper_parameters"]["class_names"]) != 2:
        _refuse("threshold", "of other than two classes")
    names = "least", "value", "reached"
    least, value, reached = (
        None if given[n] is None else _number(given[n], n, 0.0, 1.0) for n in names
    )
    if (least is None) != (given["measure"] not in RATES):
        _refuse("least", least)
    if (value is not None or least is None) and (value is None) != (reached is None):
        _refuse("value", value)
    aim = Aim(given["measure"], least, _whole(given["positive"], "positive", 1, least=0))
    return Calibration(temperature, num_pictures, aim, Choice(value, reached))


def _table(value: Any, name: str, fields: tuple[str, ...]) -> dict[str, Any]:
    if type(value) is not dict or value.keys() != set(fields):
        _refuse(name, value)
    return value


def _number(value: Any, name: str, least: float, most: float) -> float:
    if type(value) is not float or not least <= value <= most:
        _refuse(name, value)
    return value


def _whole(value: Any, name: str, most: int, least: int = 1) -> int:
    if type(value) is not int or not least <= value <= most:
        _refuse(name, value)
    return value


def _refuse(name: str, value: Any) -> NoReturn:
    text = (
        repr(value) if value is None or type(value) in (int, float, str) else type(value).__name__
    )
    raise ValueError(
        f"the checkpoint is not as `finetune fit` writes them: its {name} is {text[:80]}"
    )
