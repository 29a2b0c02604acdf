"""Files of torch from anybody, read without running what they hold, or told in one line why not."""

import pickle
import re
from pathlib import Path
from typing import Any

import torch

_OBJECT = re.compile(r"GLOBAL (\S+)")  # in torch's words


def load_safely(path: str | Path) -> Any:
    """Return what a checkpoint holds, on the CPU: tensors and plain values, nothing else is ever unpickled.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no file of torch's, is damaged, or holds something else.
    """
    if not Path(path).is_file():
        hint = ": it is a folder; give the file in it, such as checkpoints/best.ckpt" if Path(path).is_dir() else ""
        raise FileNotFoundError(f"there is no checkpoint {str(path)!r}{hint}")
    with open(path, "rb") as file:
        head = file.read(8)
    # torch takes all but a zip archive for a pickle of its first years; checkpoints never were that.
    reason = f"it begins with {head!r}, unlike what torch writes" if head else "it is empty"
    if head.startswith(b"PK"):
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # half a dozen types for a file that is not torch's
            reason = "it is damaged, or an archive of something else"
            if isinstance(error, pickle.UnpicklingError):  # torch's own line advises to run what the file holds
                named = _OBJECT.search(str(error))
                reason = f"it holds {named[1] if named else 'objects'}, which is neither a tensor nor a plain value"
    raise ValueError(f"{str(path)!r} is not a checkpoint that can be loaded safely: {reason}")
