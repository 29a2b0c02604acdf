"""Read untrusted files of torch without running code from them."""

import pickle
import re
from pathlib import Path
from typing import Any

import torch

from finetune.system.messages import shown

_OBJECT = re.compile(r"GLOBAL (\S+)")  # in torch's error message
_LONGEST_NAME = 100
_PATHS = ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")


class _Ignored:
    """Replaces a harmless object next to the weights. It accepts all arguments and stores none."""

    def __new__(cls, *args: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _PlainDict:
    """Replaces a subclass of dict by a plain dict. The unpickler adds its items."""

    def __new__(cls, *args: Any) -> Any:
        return {}


# Classes and functions that other trainers save next to the weights, for arguments, settings and scores. The real ones
# are never imported or called.
_IGNORED = (
    "argparse.Namespace",  # timm, torchvision's references
    "types.SimpleNamespace",
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS),
    *(
        f"numpy.{core}.multiarray.{name}"
        for core in ("core", "_core")
        for name in ("scalar", "_reconstruct")
    ),
    "numpy.dtype",
    "numpy.ndarray",
    *(
        f"builtins.{name}" for name in ("bool", "dict", "float", "int", "list", "str", "tuple")
    ),  # types as values
    "typing.Any",
    "omegaconf.base.ContainerMetadata",  # Hydra, in the hyperparameters of Lightning
    "omegaconf.base.Metadata",
    "omegaconf.dictconfig.DictConfig",
    "omegaconf.listconfig.ListConfig",
    *(
        f"omegaconf.nodes.{kind}Node"
        for kind in ("Any", "Boolean", "Bytes", "Enum", "Float", "Integer", "Path", "String")
    ),
)
_DICTS = (
    "collections.defaultdict",
    "lightning.fabric.utilities.data.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict",
    "pytorch_lightning.utilities.parsing.AttributeDict",
)
_STAND_INS: list[Any] = [
    *((_Ignored, name) for name in _IGNORED),
    *((_PlainDict, name) for name in _DICTS),
]


def load_weights_file(path: str | Path) -> Any:
    """Return the tensors and plain values of a file that any trainer has saved, on the CPU. No code from it runs.

    Objects of `_IGNORED` are skipped. All other objects are errors.

    Raises:
        pickle.UnpicklingError: The file holds another object; see `named_object`.
        Exception: The file is damaged. The unpickler raises errors of many types.
    """
    with torch.serialization.safe_globals(_STAND_INS):
        return torch.load(path, map_location="cpu", weights_only=True)


def named_object(error: Exception) -> str | None:
    """Return the name of the object that torch refused to unpickle; None for any other error."""
    if not isinstance(error, pickle.UnpicklingError):
        return None
    named = _OBJECT.search(str(error))
    return shown(named[1])[:_LONGEST_NAME] if named else None


def load_safely(path: str | Path) -> Any:
    """Return the content of a checkpoint, on the CPU. Only tensors and plain values are unpickled.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file does not come from torch, is damaged, or holds other objects.
    """
    if not Path(path).is_file():
        hint = (
            ": it is a folder; pass the file in it, such as checkpoints/best.ckpt"
            if Path(path).is_dir()
            else ""
        )
        raise FileNotFoundError(f"there is no checkpoint {str(path)!r}{hint}")
    with open(path, "rb") as file:
        head = file.read(8)
    # torch reads a file that is not a zip archive as a pickle of its early versions. Our checkpoints are zip archives.
    reason = f"it begins with {repr(head)[1:]}, unlike what torch writes" if head else "it is empty"
    if head.startswith(b"PK"):
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # the unpickler raises errors of many types
            reason = "it is damaged, or an archive of something else"
            # torch's own message advises the user to run the code in the file
            if isinstance(error, pickle.UnpicklingError):
                reason = f"it holds {named_object(error) or 'objects'}, which is neither a tensor nor a plain value"
    raise ValueError(f"{str(path)!r} is not a checkpoint that can be loaded safely: {reason}")
