"""What decides about the pixels that are read, as a hash: what is computed of them once is found again by it."""

import hashlib
import os
from typing import Any

import albumentations
import cv2
import PIL

import finetune
from finetune.data.readers import FileReader, GreyReader
from finetune.system.cache_dir import files_digest


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
    versions = [str(module.__version__) for module in (finetune, albumentations, cv2, PIL)]
    digest.update(repr((about, os.path.realpath(root), versions)).encode())
    return digest.hexdigest()
