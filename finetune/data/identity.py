"""What decides about the pixels that are read, as a hash: what is computed of them once is found again by it."""

import hashlib
import inspect
import os
import sys
from typing import Any

import albumentations as A
import cv2
import PIL

import finetune
from finetune.data.readers import FileReader, GreyReader
from finetune.data.transforms import parts
from finetune.system.cache_dir import files_digest

_VERSIONED = {"albumentations", "builtins", "finetune"}  # packages whose code their versions stand for


def identity(read: Any, root: str, about: object) -> str:
    """Return a hash of all that decides about pixels.

    Args:
        read: Gives picture i.
        root: The folder of the data set.
        about: What is done with the pictures, as plain values.

    Raises:
        ValueError: `read` does not say which pictures it reads.
    """
    files = getattr(read, "files", read)  # of what was decoded before
    if isinstance(files, FileReader):
        digest = hashlib.sha256(files_digest(files.paths, root).encode())
    elif isinstance(files, GreyReader):
        digest = hashlib.sha256(files.pixels.tobytes())
    else:
        raise ValueError(f"{type(files).__name__} does not say which pictures it reads")
    versions = [str(module.__version__) for module in (finetune, A, cv2, PIL)]
    digest.update(repr((about, os.path.realpath(root), versions)).encode())
    return digest.hexdigest()


def code_of(transform: A.Compose) -> list[str]:
    """Return a hash of the source of each module whose transforms are neither albumentations' nor ours.

    What such a module imports is not looked at.

    Raises:
        ValueError: Such a module has no source, as a notebook has none.
    """
    modules = {kind.__module__ for part in parts(transform) for kind in type(part).__mro__}
    hashes = []
    for name in sorted(name for name in modules if name.partition(".")[0] not in _VERSIONED):
        try:
            source = inspect.getsource(sys.modules[name])
        except (KeyError, OSError, TypeError) as error:
            raise ValueError(f"the transforms of {name} have no source to tell a change by: {error}") from error
        hashes.append(hashlib.sha256(source.encode()).hexdigest())
    return hashes
