"""The folder of caches, the suffix of their files, and how large a cache may be."""

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

IMAGES = ".images"
COPIES = "copies-of-images"  # the folder in that of caches with copies of images in object storage and of archives
COPIES_MARK = ".finetune-copies"  # an empty file in each folder there
# Each cache file begins with a header: this mark, then fields that depend on the kind of cache.
MARK = b"finetune's cache"
HEADER_BYTES = 64


def cache_dir() -> Path:
    """Return the folder of all caches: FINETUNE_CACHE, or else `finetune` in the user's cache folder."""
    if folder := os.environ.get("FINETUNE_CACHE"):
        return Path(folder)
    usual = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or usual, "finetune").expanduser()


def available_bytes(folder: Path) -> float:
    """Return how many bytes a new cache may take: half of the free space."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free / 2


def has_mark(path: Path) -> bool:
    """Return whether a file is a cache that this program wrote, perhaps damaged or not finished."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MARK)) == MARK
    except OSError:
        return False


def mark_used(path: Path) -> None:
    """Set the time when a cache was last used, if this user may."""
    with suppress(OSError):
        os.utime(path)
