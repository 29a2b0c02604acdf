"""One checkpoint of several: the networks of several runs as the members of an ensemble."""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from finetune.data.seen_record import read_record
from finetune.inference.calibrated_head import calibrated_head
from finetune.models.image_classifier import build_image_classifier
from finetune.models.stages import head_name
from finetune.runs.checkpoint_io import AtomicCheckpointIO, read_checkpoint
from finetune.runs.predictions_table import Predictions
from finetune.training.calibration import Calibration, read_calibration, with_thresholds
from finetune.training.checkpoint_settings import model_settings

# Keys that Lightning needs to load weights. The values of the first checkpoint stand for all, although the best epochs
# of the folds differ.
_LIGHTNING_KEYS = ("epoch", "global_step", "pytorch-lightning_version")
_PREFIX = "network."

# Shapes: N images, K classes.


def join_checkpoints(
    paths: Sequence[Path],
    predictions: Sequence[Predictions],
    target: Path,
    fingerprint: str,
) -> Calibration:
    """Write a checkpoint whose probabilities are the mean of those of several checkpoints.

    The calibration of each checkpoint is moved into the head of its network. The thresholds of the new checkpoint are
    chosen on the predictions of all checkpoints together, each for images that it was not trained on.

    Args:
        paths: Checkpoints of one network and one data set, as the folds of a cross-validation write them.
        predictions: The predictions of each checkpoint for images that only the others were trained on.
        target: The checkpoint to write.
        fingerprint: Fingerprint of the data set without folds.

    Returns:
        The calibration of the new checkpoint.
    """
    parts = [read_checkpoint(path) for path in paths]
    first = parts[0]
    calibrations = [read_calibration(part) for part in parts]
    joined_calibration = _joined_calibration(calibrations, predictions)
    state = {
        name: value for name, value in first["state_dict"].items() if not name.startswith(_PREFIX)
    }
    members: list[dict[str, Tensor]] = []
    for part, calibration in zip(parts, calibrations, strict=True):
        members += _calibrated_members(part, calibration)
    for i, member in enumerate(members):
        state |= {f"{_PREFIX}members.{i}.{name}": value for name, value in member.items()}
    records = [record for part in parts if (record := read_record(part)) is not None]
    seen = reduce(or_, records).pack() if len(records) == len(parts) else None
    joined: dict[str, Any] = {
        **{name: first[name] for name in _LIGHTNING_KEYS if name in first},
        "state_dict": state,
        "hyper_parameters": {
            **first["hyper_parameters"],
            "members": len(members),
            "head_init": "auto",
        },
        "datamodule_hyper_parameters": {
            **first["datamodule_hyper_parameters"],
            "num_folds": None,
            "fold": None,
        },
        "finetune": {
            **first["finetune"],
            "calibration": joined_calibration.as_plain(),
            "data_fingerprint": fingerprint,
            "seen": seen,
            "interpolation": None,
            "train_metrics": None,
        },
    }
    for key in ("datamodule_hparams_name", "hparams_name"):
        if key in first:
            joined[key] = first[key]
    AtomicCheckpointIO().save_checkpoint(joined, target)
    return joined_calibration


def _joined_calibration(
    calibrations: Sequence[Calibration], predictions: Sequence[Predictions]
) -> Calibration:
    """Return a calibration that leaves the mean of calibrated probabilities as it is, with thresholds for it."""
    first = calibrations[0]
    num_validated = sum(calibration.num_images for calibration in calibrations)
    joined = first.without_scaling()._replace(num_images=num_validated)
    if first.label_kind == "single" and first.aim is None:
        return joined
    p = np.concatenate([part.probabilities for part in predictions])
    labels = np.concatenate([part.labels for part in predictions])
    if first.label_kind == "single":
        labels = labels.argmax(axis=1)
    return with_thresholds(joined, p, labels, first.aim)


def _calibrated_members(
    checkpoint: dict[str, Any], calibration: Calibration
) -> list[dict[str, Tensor]]:
    """Return the weights of each network of a checkpoint, so that its softmax or its sigmoids are calibrated.

    Each member of an ensemble gets the calibration of the ensemble.
    """
    settings = model_settings(checkpoint)
    num = settings.get("members", 1)
    classifier = build_image_classifier(
        settings["backbone"],
        len(settings["class_names"]),
        settings.get("network_size"),
        members=num,
        head_stages=settings.get("head_stages", 1),
    )
    weights = {
        name.removeprefix(_PREFIX): value
        for name, value in checkpoint["state_dict"].items()
        if name.startswith(_PREFIX)
    }
    members = []
    for i, network in enumerate(classifier.members):
        prefix = f"members.{i}." if num > 1 else ""
        member = {
            name.removeprefix(prefix): value
            for name, value in weights.items()
            if name.startswith(prefix)
        }
        weight = f"{head_name(network)}.weight"
        bias = f"{head_name(network)}.bias"
        member[weight], member[bias] = calibrated_head(member[weight], member[bias], calibration)
        members.append(member)
    return members
