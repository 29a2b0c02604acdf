"""Where caches lie, what they are called by, how large they may be."""

import hashlib
import os
import shutil
from collections.abc import Sequence
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


def room(folder: Path) -> float:
    """Return how many bytes a new cache may take: half of what is free."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free / 2


def files_digest(paths: Sequence[str], root: str | Path) -> str:
    """Return a hash of the relative path, size and times of change of every file, in this order.

    Of the two times programs can set one (`st_mtime`, which copying may keep); the file system sets the other
    (`st_ctime`) at every change of content, name or rights, and never when a file is read. So a file put in the place
    of another is noticed, also where size and time are the same, unless the file system keeps no such time (FAT, some
    network mounts) or its clock was set back. The number of a file (`st_ino`) would see no more, and some mounts give
    new ones each time.
    """
    digest, prefix = hashlib.sha256(), os.path.join(Path(root), "")
    for path in paths:
        try:
            status = os.stat(path)
            size, changed = status.st_size, (status.st_mtime_ns, status.st_ctime_ns)
        except OSError:  # whoever reads it will say so
            size, changed = -1, (-1, -1)
        digest.update(
            f"{path.removeprefix(prefix)}\0{size}\0{changed[0]}\0{changed[1]}\n".encode(
                errors="surrogateescape"
            )
        )
    return digest.hexdigest()


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
