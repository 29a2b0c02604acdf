"""Where caches lie, what they are called by, how large they may be."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from platformdirs import user_cache_path

PICTURES = ".pictures"
PRECISIONS = "precisions.json"  # the faster precision of each network, by a trial
FORMER = (".features", ".activations")  # what earlier versions kept, too: no run uses it any more
# Each of our caches begins with a header: this mark, which no other file has, then what the kind of cache needs.
MARK = b"finetune's cache"
HEADER_BYTES = 64


def cache_dir() -> Path:
    """Return the folder of all caches: FINETUNE_CACHE, or else `finetune` among the user's other caches."""
    own = os.environ.get("FINETUNE_CACHE")
    return Path(own) if own else user_cache_path("finetune", appauthor=False)


def available_bytes(folder: Path) -> float:
    """Return how many bytes a new cache may take: half of what is free."""
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
    """Note when a cache was last used; in somebody else's folder nobody needs to know."""
    with suppress(OSError):
        os.utime(path)
