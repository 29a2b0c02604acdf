"""One checkpoint of several: the networks of several runs as the members of an ensemble."""

from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from torch import Tensor

from finetune.data.seen_record import merge_records, read_record
from finetune.models.image_classifier import build_image_classifier
from finetune.models.stages import head_name
from finetune.runs.checkpoint_io import AtomicCheckpointIO, read_checkpoint
from finetune.system.messages import WrongUsage
from finetune.training.calibration import Calibration, read_calibration
from finetune.training.checkpoint_settings import model_settings

# Of Lightning's keys, those that are the same for all members, and are needed to load weights.
_KEPT = ("epoch", "global_step", "pytorch-lightning_version")
_PREFIX = "network."


def join_checkpoints(paths: Sequence[Path], target: Path, fingerprint: str) -> None:
    """Write a checkpoint whose probabilities are the mean of those of several checkpoints.

    The temperature of each checkpoint is moved into the head of its network: weights and bias are divided by it.

    Args:
        paths: Checkpoints of one network and one data set, as the folds of a cross-validation write them.
        target: The checkpoint to write.
        fingerprint: Fingerprint of the data set without folds.

    Raises:
        WrongUsage: The checkpoints predict several labels per image. Their thresholds do not hold for the mean.
    """
    parts = [read_checkpoint(path) for path in paths]
    first = parts[0]
    calibrations = [_single_label_calibration(part) for part in parts]
    state = {
        name: value for name, value in first["state_dict"].items() if not name.startswith(_PREFIX)
    }
    members: list[dict[str, Tensor]] = []
    for part, calibration in zip(parts, calibrations, strict=True):
        members += _calibrated_members(part, calibration.temperature)
    for i, member in enumerate(members):
        state |= {f"{_PREFIX}members.{i}.{name}": value for name, value in member.items()}
    num_pictures = sum(calibration.num_pictures for calibration in calibrations)
    records = [record for part in parts if (record := read_record(part)) is not None]
    seen = reduce(merge_records, records).pack() if len(records) == len(parts) else None
    joined: dict[str, Any] = {
        **{name: first[name] for name in _KEPT if name in first},
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
            "calibration": Calibration(1.0, num_pictures).as_plain(),
            "data_fingerprint": fingerprint,
            "seen": seen,
            "interpolation": None,
            "train_metrics": {},
        },
    }
    for key in ("datamodule_hparams_name", "hparams_name"):
        if key in first:
            joined[key] = first[key]
    AtomicCheckpointIO().save_checkpoint(joined, target)


def _single_label_calibration(checkpoint: dict[str, Any]) -> Calibration:
    calibration = read_calibration(checkpoint)
    if not isinstance(calibration, Calibration):
        raise WrongUsage(
            "folds with several labels per image cannot be exported as one network; export one of the folds"
        )
    return calibration


def _calibrated_members(checkpoint: dict[str, Any], temperature: float) -> list[dict[str, Tensor]]:
    """Return the weights of each network of a checkpoint, so that its softmax is calibrated."""
    settings = model_settings(checkpoint)
    num = settings.get("members", 1)
    classifier = build_image_classifier(
        settings["backbone"],
        len(settings["class_names"]),
        settings.get("network_size"),
        members=num,
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
        for name in (f"{head_name(network)}.weight", f"{head_name(network)}.bias"):
            if name in member:
                member[name] = member[name] / temperature
        members.append(member)
    return members
