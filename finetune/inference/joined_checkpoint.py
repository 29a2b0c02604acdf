"""One checkpoint of several: the networks of several fits as the members of an ensemble."""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

from torch import Tensor

from finetune.data.seen import read_record
from finetune.models.backbones import skeleton
from finetune.models.stages import head_name
from finetune.training.calibration import Calibration

# Keys that Lightning needs to load weights. The values of the first checkpoint stand for all, although the best epochs
# of the fits differ.
_LIGHTNING_KEYS = (
    *("epoch", "global_step", "pytorch-lightning_version"),
    *("datamodule_hparams_name", "hparams_name"),
)
_PREFIX = "network."


def network_of(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of the network of a checkpoint."""
    return {
        name.removeprefix(_PREFIX): value
        for name, value in checkpoint["state_dict"].items()
        if name.startswith(_PREFIX)
    }


def calibrated_network(
    checkpoint: Mapping[str, Any], calibration: Calibration
) -> dict[str, Tensor]:
    """Return the weights of the network of a checkpoint, so that its softmax or its sigmoids are calibrated."""
    weights = network_of(checkpoint)
    name = head_name(skeleton(checkpoint["hyper_parameters"]["backbone"]))
    weight = f"{name}.weight"
    bias = f"{name}.bias"
    weights[weight], weights[bias] = calibrated_head(weights[weight], weights[bias], calibration)
    return weights


def calibrated_head(
    weight: Tensor, bias: Tensor, calibration: Calibration
) -> tuple[Tensor, Tensor]:
    """Return the weight (K, D) and the bias (K,) of a head, changed so that its logits are calibrated.

    They are computed in float64, and returned in the dtypes of the arguments.
    """
    # one for all classes, or one for each label
    scale = weight.double().new_tensor(calibration.scale)
    shift = bias.double().new_tensor(calibration.bias)
    return (
        (weight.double() * scale[:, None]).to(weight.dtype),
        (bias.double() * scale + shift).to(bias.dtype),
    )


def join_checkpoints(
    checkpoints: Sequence[Mapping[str, Any]],
    networks: Sequence[Mapping[str, Tensor]],
    calibration: Calibration,
    fingerprint: str,
) -> dict[str, Any]:
    """Return the checkpoint of an ensemble, whose probabilities are the mean of those of several networks.

    Args:
        checkpoints: Those of several fits of one network, as folds or members.
        networks: The weights of the networks.
        calibration: The calibration of the ensemble.
        fingerprint: Fingerprint of the data set without folds.
    """
    first = checkpoints[0]
    state = {
        name: value for name, value in first["state_dict"].items() if not name.startswith(_PREFIX)
    }
    for i, network in enumerate(networks):
        state |= {f"{_PREFIX}members.{i}.{name}": value for name, value in network.items()}
    records = [record for one in checkpoints if (record := read_record(one)) is not None]
    seen = reduce(or_, records).pack() if len(records) == len(checkpoints) else None
    of_data = first["datamodule_hyper_parameters"]
    return {
        **{name: first[name] for name in _LIGHTNING_KEYS if name in first},
        "state_dict": state,
        "hyper_parameters": {
            **first["hyper_parameters"],
            "members": len(networks),
            "init_seed": None,
        },
        "datamodule_hyper_parameters": {**of_data, "num_folds": None, "fold": None},
        "finetune": {
            **first["finetune"],
            "calibration": calibration.as_plain(),
            "data_fingerprint": fingerprint,
            "seen": seen,
            "familiarity": None,  # the members have different features
            "train_metrics": None,
        },
    }
