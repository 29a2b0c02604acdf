"""Read untrusted files of torch without running code from them."""

import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from finetune.system.messages import shown

_OBJECT = re.compile(r"GLOBAL (\S+)")  # in torch's error message
_LONGEST_NAME = 100


class _Ignored:
    """Replaces a harmless object next to the weights. It accepts all arguments and stores none."""

    def __new__(cls, *args: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


# What the training scripts of timm and torchvision save next to the weights: their arguments, and scores of NumPy. The
# real classes and functions are never imported or called.
_STAND_INS: list[Any] = [
    (_Ignored, name)
    for name in (
        "argparse.Namespace",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar",
        "numpy.dtype",
    )
]


COMPRESSED = (
    "is a compressed archive, or one whose entries overlap, unlike those of torch: save it again "
    "with torch.save"
)


def is_compressed(path: str | Path) -> bool:
    """Return whether a file is an archive that is compressed or has overlapping entries.

    Unpacked, a small one could take all memory.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > os.path.getsize(path):
            return True
        return any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
    except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError):
        return False  # another kind of file, or damaged: its reader says so


def load_weights_file(path: str | Path) -> Any:
    """Return the tensors and plain values of a file that any trainer has saved, on the CPU. No code from it runs.

    Objects of `_STAND_INS` are skipped. All other objects are errors.

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
        ValueError: The file does not come from torch, is damaged or compressed, or holds other objects.
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
    if is_compressed(path):
        reason = f"it {COMPRESSED}"
    elif head.startswith(b"PK"):
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # the unpickler raises errors of many types
            reason = "it is damaged, or an archive of something else"
            # torch's own message advises the user to run the code in the file
            if isinstance(error, pickle.UnpicklingError):
                reason = f"it holds {named_object(error) or 'objects'}, which is neither a tensor nor a plain value"
    raise ValueError(f"{str(path)!r} is not a checkpoint that can be loaded safely: {reason}")
