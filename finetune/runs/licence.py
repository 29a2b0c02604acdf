"""Whose terms hold for what a network learned before its training here: the one place that says it."""

import os
from pathlib import PurePath

from torchvision import models

from finetune.models.backbones import SMALL_NETWORKS
from finetune.models.timm_backbones import describe, is_timm
from finetune.system.messages import shown

# As timm's descriptions name them. What else they name has terms of its own.
_FREE = {"apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0"}
_NOT_COMMERCIAL = ("-nc", "noncommercial", "apple-amlr", "seer")  # in the name
_WARNING = "commercial use is not allowed"
_OTHER = "terms of their own"
_OWN = "a licence of their own"
_FILES = (".pt", ".pth", ".safetensors", ".ckpt")
_BEGAN = ", on the terms of whoever trained it, which began with "


def licence(
    weights: str | None,
    backbone: str,
    began_from: str | None = None,
    is_file: bool = False,
    known: str | None = None,
) -> str:
    """Return what training started from and whose terms hold for it, in a sentence; what is not known is unknown.

    Args:
        weights: As `model.weights` has them: torchvision's name, a file, a folder of timm's, None for random ones.
        backbone: Of which network.
        began_from: The checkpoint of another run that training went on from instead.
        is_file: Whether the weights are a file, whose name may end as it likes.
        known: This sentence for the run that the checkpoint or the file comes from, if it is one of ours.
    """
    is_file = is_file or str(weights).endswith(_FILES)
    if known and (began_from or is_file):
        which = f"the checkpoint {began_from}" if began_from else f"the file {weights}"
        return f"{which}{_BEGAN}{shown(known.rpartition(_BEGAN)[2])}"
    if began_from:
        return f"the checkpoint {began_from}: licence unknown, its terms hold"
    if weights is None:
        return "random weights: nobody else's terms hold"
    if is_timm(str(backbone)) and not is_file:
        return _of_timm(weights, backbone)
    if is_file:
        return f"the file {weights}: licence unknown, whoever gave it to you says on which terms"
    if terms := _own_terms(weights, backbone):
        return f"torchvision's {weights} weights, which have {_OWN}: {terms}"
    return (
        f"torchvision's {weights} weights, learned from ImageNet: torchvision's code is under the BSD 3-Clause "
        "licence, and its authors leave it to you whether ImageNet's terms allow your use"
    )


def is_restricted(text: str) -> bool:
    """Return whether a sentence of `licence` is one that somebody should read before all else."""
    return any(words in text for words in (_WARNING, _OTHER, _OWN))


def _of_timm(weights: str, backbone: str) -> str:
    """Return the same of weights that say under which licence they are."""
    is_folder = weights != "DEFAULT"
    if is_folder and not os.path.isdir(weights):
        return f"the folder {PurePath(weights).name}: licence unknown, whoever gave it to you says on which terms"
    about = describe(backbone, weights if is_folder else None)
    which = (
        f"the weights in the folder {PurePath(weights).name}"
        if is_folder
        else f"timm's {about.name} weights"
    )
    name = about.licence or "unknown"
    if name == "unknown":
        return f"{which}: licence unknown"
    if any(part in name for part in _NOT_COMMERCIAL):
        return f"{which}, licence {name}: {_WARNING}"
    return f"{which}, licence {name}" + (
        "" if name in _FREE else f": {_OTHER}, which you should read"
    )


def _own_terms(weights: str, backbone: str) -> str | None:
    if backbone in SMALL_NETWORKS or backbone not in models.list_models():
        return None
    members = models.get_model_weights(backbone).__members__
    found = members.get(weights.rpartition(".")[2])
    return found.meta.get("license") if found else None
