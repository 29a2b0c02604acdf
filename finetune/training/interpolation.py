"""Interpolation of weights between the start and the end of a fit, chosen on the validation images.

Training can make a pretrained network with a fitted head worse, mostly if there are few images. Weights on the straight
line from the start to the end often predict better than either, and cost no more than a single network. The start is
among the candidates, so that the fitted head remains if training clearly made it worse.

Source: Wortsman et al. 2022, WiSE-FT (arXiv:2109.01903). How the share is chosen is measured in
benchmarks/NOTEBOOK.md, "Start, average or end".
"""

# Shapes: S shares, N validation images, K classes.

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.runs.interpolation_record import InterpolatedWeights, Interpolation
from finetune.training.calibration import Calibration
from finetune.training.calibration_fit import fit_calibration
from finetune.training.loss import losses_of
from finetune.training.outputs import collect
from finetune.training.threshold import Aim

SHARES = (0.0, 0.75, 1.0)  # candidates: 0 is the start, 1 is the end
# Candidates if batch norm trains: interpolated statistics do not fit interpolated weights.
ENDS = (0.0, 1.0)


def interpolate(
    start: Mapping[str, Tensor], end: Mapping[str, Tensor], share: float
) -> dict[str, Tensor]:
    """Interpolate linearly between the tensors of `start` (share 0) and `end` (share 1). Integers are those of `end`.

    At 0 and 1 the floating point tensors are exactly those of `start` and `end`.
    """
    if share == 1:
        return dict(end)
    between = {}
    for name, value in end.items():
        if value.is_floating_point() and share == 0:  # lerp would give NaN if the end is NaN
            between[name] = start[name]
        elif value.is_floating_point():
            between[name] = torch.lerp(start[name].double(), value.double(), share).to(value.dtype)
        else:
            between[name] = value
    return between


def choose(losses: NDArray[np.float64]) -> int:
    """Return the index of the candidate to keep.

    It is the end if its loss is clearly lower than that of the start. Otherwise it is the second candidate, or the
    start if the loss of the start is clearly lower than that of the second candidate. A difference is clear if it is
    larger than its standard error. Without a candidate between start and end, the second candidate is the end.

    Args:
        losses: The loss of each validation image for each candidate, (S, N), from the start to the end.
    """
    if _is_clearly_lower(losses[-1], losses[0]):
        return len(losses) - 1
    middle = 1  # the second candidate, which is the end if there are only two
    return 0 if _is_clearly_lower(losses[0], losses[middle]) else middle


def _is_clearly_lower(losses: NDArray[np.float64], others: NDArray[np.float64]) -> bool:
    """Return whether the mean of `losses` (N,) is lower than that of `others` (N,) by more than one standard error.

    The standard error is that of the paired differences.
    """
    differences = others - losses
    if len(differences) < 2:
        return False
    return bool(differences.mean() > differences.std(ddof=1) / math.sqrt(len(differences)))


@torch.no_grad()
def settle(
    trainer: pl.Trainer,
    model: Any,
    *,
    start: Mapping[str, Tensor],
    end: Mapping[str, Tensor],
    batches: Iterable[Mapping[str, Any]],
    shares: Sequence[float],
    aim: Aim | None,
) -> tuple[Interpolation, dict[str, Tensor], Calibration]:
    """Measure the candidates on the validation images and return the choice, its weights and its calibration.

    One process does this alone on all validation images, so that the choice does not depend on the number of devices.

    Args:
        trainer: Its device and precision are used.
        model: A `Classifier`. It has the weights of the last candidate afterwards.
        start: The state dict of the start.
        end: The state dict of the end.
        batches: The validation images. They are read once per candidate.
        shares: The candidates.
        aim: What a threshold is chosen for; None for the default of the task.

    Raises:
        ValueError: There is no validation image.
    """
    trainer.precision_plugin.convert_module(model)
    model.to(trainer.strategy.root_device).eval()
    losses = []
    candidates = []
    calibrations = []
    for share in shares:
        model.load_state_dict(interpolate(start, end, share))
        outputs = collect(trainer, model, batches).own()
        logits = outputs.logits
        labels = outputs.labels
        if len(labels) == 0:
            raise ValueError(
                "there is no validation image on which to choose between the start and the end of the fit"
            )
        calibration = fit_calibration(logits, labels, aim)
        # NaN counts as a wrong prediction
        probabilities = calibration.probabilities(logits).nan_to_num(nan=0.0)
        loss = losses_of(probabilities, labels)  # (N,)
        losses.append(loss.numpy())
        score = model.task.score(logits, labels)
        candidates.append(InterpolatedWeights(share, float(loss.mean()), score))
        calibrations.append(calibration)
    chosen = choose(np.stack(losses))
    metric = model.task.monitor.removeprefix("val/")
    interpolation = Interpolation(shares[chosen], tuple(candidates), len(losses[0]), metric)
    return interpolation, interpolate(start, end, shares[chosen]), calibrations[chosen]
