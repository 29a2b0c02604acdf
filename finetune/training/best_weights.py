"""The weights that a fit keeps: those before training, those of the best epoch, or an average of both.

Training can make a pretrained network with a fitted head worse, mostly if there are few images. Weights on the straight
line from the start to the end often predict better than either, and cost no more than a single network. All candidates
are measured on the validation images, and one rule chooses (`choose`).

Source: Wortsman et al. 2022, WiSE-FT (arXiv:2109.01903). How the share is chosen is measured in
docs/decisions.md.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning import Trainer
from torch import Tensor

from finetune.data.datamodule import ImageDataModule
from finetune.data.samplers import evaluated_targets
from finetune.models.stages import batch_norms
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.folder import Run
from finetune.runs.headline import Best, validation_headline
from finetune.training.calibration import Calibration
from finetune.training.loss import losses_of
from finetune.training.outputs import collect
from finetune.training.threshold import Aim

# Shapes: S shares, N validation images, K classes.

SHARES = (0.0, 0.75, 1.0)  # candidates: 0 is the start, 1 is the end
# Candidates if batch norm trains: interpolated statistics do not fit interpolated weights.
ENDS = (0.0, 1.0)
# The large sections of a checkpoint.
_WEIGHTS = ("state_dict", "optimizer_states", "callbacks")


def keep_best_weights(
    trainer: Trainer, model: Any, data: ImageDataModule, run: Run
) -> dict[str, Any] | None:
    """Replace the weights of best.ckpt by the best of those on the line from start.ckpt to best.ckpt.

    Rank 0 measures the candidates alone. A run that was killed before this step does it when it is resumed, before the
    processes of other devices are started. Without start.ckpt or validation images, nothing changes.

    Args:
        trainer: Its device, precision and limit of validation batches are used.
        model: A `Classifier`. Its weights change if there is a choice.
        data: Its validation images are measured.
        run: The run, trained to its end.

    Returns:
        The content of best.ckpt without weights and states; None if there is no best.ckpt.
    """
    path = run.checkpoint("best")
    is_validated = "val" in data.splits and trainer.limit_val_batches != 0
    if is_validated and run.checkpoint("start").exists() and path.exists():
        if trainer.is_global_zero:
            best = read_checkpoint(path)
            if best["finetune"].get("interpolation") is None:
                _replace(trainer, model, data, run, best)
            run.dir.update(best=_record(trainer, model, data, best))
        trainer.strategy.barrier("best.ckpt with the chosen weights")
    if not path.exists():
        return None
    content = read_checkpoint(path)
    return {name: value for name, value in content.items() if name not in _WEIGHTS}


def _replace(
    trainer: Trainer, model: Any, data: ImageDataModule, run: Run, best: dict[str, Any]
) -> None:
    """Measure the candidates, and write best.ckpt with the weights of the chosen one.

    The arguments are those of `keep_best_weights`, and the content of best.ckpt, in which weights, calibration and the
    record of the choice are replaced.
    """
    try:
        start = read_checkpoint(run.checkpoint("start"))
    except ValueError as error:
        hint = f"delete it, and finetune fit --resume {run.path} keeps the fine-tuned weights"
        raise ValueError(f"{error}; training is complete: {hint}") from error
    if data.trainer is None:
        data.trainer = trainer
    weights, calibration, choice = settle(
        trainer,
        model,
        start=start["state_dict"],
        end=best["state_dict"],
        batches=data.loader("val", is_limited=True, is_unsharded=True),
        shares=ENDS if _has_trained_statistics(model) else SHARES,
        aim=model.aim,
    )
    best["state_dict"] = weights
    best["finetune"]["calibration"] = calibration.as_plain()
    best["finetune"]["interpolation"] = choice
    checkpoint_io = trainer.strategy.checkpoint_io
    checkpoint_io.save_checkpoint(best, run.checkpoint("best"), run.forget_best)


def _has_trained_statistics(model: Any) -> bool:
    """Return whether training changed the statistics of any batch norm."""
    fixed = {id(module) for part in model.always_eval for module in part.modules()}
    return any(id(norm) not in fixed for norm in batch_norms(model.network))


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


@torch.no_grad()
def settle(
    trainer: Trainer,
    model: Any,
    *,
    start: Mapping[str, Tensor],
    end: Mapping[str, Tensor],
    batches: Iterable[Mapping[str, Any]],
    shares: Sequence[float],
    aim: Aim | None,
) -> tuple[dict[str, Tensor], Calibration, dict[str, Any]]:
    """Measure the candidates on the validation images. Return the chosen weights, their calibration and a record.

    One process does this alone on all validation images, so that the choice does not depend on the number of devices.

    Args:
        trainer: Its device and precision are used.
        model: A `Classifier`. It has the weights of the last candidate afterwards.
        start: The state dict of the start.
        end: The state dict of the end.
        batches: The validation images. They are read once per candidate.
        shares: The candidates.
        aim: What a threshold is chosen for; None for the default of the task.

    Returns:
        The record has plain values, for a checkpoint and test.json: the `share` of the choice, `num_images`, and of the
        `candidates` their `share`, mean `loss` with the fitted calibration, and `accuracy` or `mAP`.

    Raises:
        ValueError: There is no validation image.
    """
    trainer.precision_plugin.convert_module(model)
    model.to(trainer.strategy.root_device).eval()
    metric = model.task.monitor.removeprefix("val/")
    losses = []
    calibrations = []
    candidates = []
    for share in shares:
        model.load_state_dict(interpolate(start, end, share))
        outputs = collect(trainer, model, batches).own()
        if len(outputs.labels) == 0:
            raise ValueError(
                "there is no validation image on which to choose between the start and the end of the fit"
            )
        calibrations.append(Calibration.fit(outputs.logits, outputs.labels, aim))
        # NaN counts as a wrong prediction
        probabilities = calibrations[-1].probabilities(outputs.logits).nan_to_num(nan=0.0)
        losses.append(losses_of(probabilities, outputs.labels).numpy())
        score = model.task.score(outputs.logits, outputs.labels)
        candidates.append({"share": share, "loss": float(losses[-1].mean()), metric: score})
    chosen = choose(np.stack(losses))
    record = {"share": shares[chosen], "num_images": len(losses[0]), "candidates": candidates}
    return interpolate(start, end, shares[chosen]), calibrations[chosen], record


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
    return 0 if _is_clearly_lower(losses[0], losses[1]) else 1


def _is_clearly_lower(losses: NDArray[np.float64], others: NDArray[np.float64]) -> bool:
    """Return whether the mean of `losses` (N,) is lower than that of `others` (N,) by more than one standard error.

    The standard error is that of the paired differences.
    """
    differences = others - losses
    if len(differences) < 2:
        return False
    return bool(differences.mean() > differences.std(ddof=1) / math.sqrt(len(differences)))


def _record(
    trainer: Trainer, model: Any, data: ImageDataModule, content: Mapping[str, Any]
) -> Best:
    """Return the record of a best.ckpt in which the choice was made, for run.json."""
    choice = content["finetune"]["interpolation"]
    epoch = content["epoch"] + 1
    share = choice["share"]
    metric = model.task.monitor.removeprefix("val/")
    by_share = {one["share"]: one for one in choice["candidates"]}
    weights = {0: "before training", 1: f"epoch {epoch}"}.get(
        share, f"{100 * share:.0f} % of the way to epoch {epoch}"
    )
    measured = {"before training": 0, f"epoch {epoch}": 1, weights: share}
    values = [
        f"{name} {by_share[at]['loss']:.4f} ({metric} {by_share[at][metric]:.3f})"
        for name, at in measured.items()
    ]
    neither = "" if share in (0, 1) else ", since neither end is clearly better"
    num_images = choice["num_images"]
    targets = evaluated_targets(
        data.splits["val"].targets, trainer.limit_val_batches, data.batch_size
    )
    num_trials = model.task.num_trials(targets)
    score = by_share[share][metric]
    return Best(
        epoch=epoch,
        weights=weights,
        why=f"{weights}{neither}, by the loss on {num_images} validation images: {', '.join(values)}",
        share=share,
        result=validation_headline(metric, score, num_images, num_trials, weights),
    )
