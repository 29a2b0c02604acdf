"""The licence of the weights that training started from. All other modules take it from here."""

from pathlib import Path, PurePath

from finetune.models.backbones import library_of
from finetune.models.hub import is_hub, name_with_commit
from finetune.models.library import DEFAULT
from finetune.models.network_names import is_timm
from finetune.models.weights import folder_of
from finetune.system.messages import shown

# Names in timm's descriptions. Any other licence has terms of its own.
_FREE = {"apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0"}
_NOT_COMMERCIAL = ("-nc", "noncommercial", "apple-amlr", "seer")  # parts of the names
_WARNING = "commercial use is not allowed"
_OTHER = "terms of their own"
_OWN = "a licence of their own"
_FILES = (".pt", ".pth", ".safetensors", ".ckpt")
_BEGAN = ", whose author decides on its licence; its training started from "


def licence(
    weights: str | None,
    backbone: str,
    began_from: str | None = None,
    is_file: bool = False,
    known: str | None = None,
) -> str:
    """Return what training started from and its licence, in a sentence. The licence may be `unknown`.

    Args:
        weights: As `model.weights`: torchvision's name, a file, a folder with timm's weights, an address on the hub,
            None for random weights. Nothing is downloaded.
        backbone: The network.
        began_from: The checkpoint of another run that training started from instead.
        is_file: Whether the weights are a file. Otherwise that is decided by the suffix.
        known: The sentence for the run that the checkpoint or file comes from, if it is a run of finetune.
    """
    is_file = is_file or str(weights).endswith(_FILES)
    is_folder = weights is not None and is_timm(str(backbone)) and not is_file
    folder = folder_of(weights, may_download=False) if is_folder else None
    if known and (began_from or is_file or folder):
        which = f"the checkpoint {began_from}" if began_from else f"the file {weights}"
        if not began_from and folder:
            which = _name_of(str(weights), folder)
        return f"{which}{_BEGAN}{shown(known.rpartition(_BEGAN)[2])}"
    if began_from:
        return f"the checkpoint {began_from}: licence unknown, its terms apply"
    if weights is None:
        return "random weights, which need no licence"
    if is_folder:
        return _of_timm(weights, backbone, folder)
    if is_file:
        return f"the file {weights}: licence unknown, ask its author for the terms"
    terms = library_of(backbone).describe(backbone, weights).licence
    if terms:
        return f"torchvision's {weights} weights, which have {_OWN}: {terms}"
    return (
        f"torchvision's {weights} weights, trained on ImageNet: torchvision's code is under the BSD 3-Clause "
        "licence, and its authors leave it to you whether ImageNet's terms allow your use"
    )


def is_restricted(text: str) -> bool:
    """Return whether a sentence of `licence` names terms that the user must read."""
    return any(words in text for words in (_WARNING, _OTHER, _OWN))


def _of_timm(weights: str, backbone: str, folder: str | None) -> str:
    """Return the sentence for timm's weights, whose description has the licence.

    Args:
        weights: As for `licence`.
        backbone: The network.
        folder: The folder with the weights; None if they are published ones, or not on this machine.
    """
    if weights != "DEFAULT" and folder is None:
        which = weights if is_hub(weights) else f"the folder {PurePath(weights).name}"
        return f"{which}: licence unknown, ask its author for the terms"
    about = library_of(backbone).describe(backbone, folder or DEFAULT)
    which = f"timm's {about.name} weights" if folder is None else _name_of(weights, folder)
    name = about.licence or "unknown"
    if name == "unknown":
        return f"{which}: licence unknown"
    if any(part in name for part in _NOT_COMMERCIAL):
        return f"{which}, licence {name}: {_WARNING}"
    return f"{which}, licence {name}" + (
        "" if name in _FREE else f": {_OTHER}, which you should read"
    )


def _name_of(weights: str, folder: str) -> str:
    if is_hub(weights):
        return f"the weights of {name_with_commit(weights, Path(folder))}"
    return f"the weights in the folder {PurePath(weights).name}"
