"""Recognises an incomplete packed folder: a part of a copy, or one that `finetune pack` has not finished."""

import json
from fnmatch import fnmatch

from finetune.data.pack_place import INDEX, shard_name
from finetune.data.storage import storage_of

_FIRST_LINE = 2**16  # bytes of an index that are read, at most


def pack_fault(folder: str) -> str:
    """Return an error message about what a packed folder lacks; "" if it lacks nothing or is not a packed folder.

    Args:
        folder: A folder without images.

    Raises:
        OSError: It cannot be read.
    """
    names = {entry.name for entry in storage_of(folder).entries(folder)}
    has_shards = any(fnmatch(name, "shard-*.tar") for name in names)
    if INDEX not in names and has_shards:
        return (
            f"{folder} has shards of a packed folder without {INDEX}, which is written last: wait for finetune pack, "
            "copy the folder again, or pack the images again"
        )
    if INDEX in names and shard_name(0) not in names and _is_index(f"{folder}/{INDEX}"):
        return (
            f"{folder} has the {INDEX} of a packed folder without {shard_name(0)}: copy the folder again, or pack the "
            "images again"
        )
    return ""


def _is_index(path: str) -> bool:
    """Return whether a file of this name has been written by `finetune pack`."""
    _, (begin,) = storage_of(path).read_pieces(path, _FIRST_LINE, lambda _: [0])
    try:
        row = json.loads(begin.partition(b"\n")[0])
    except ValueError:
        return False
    return isinstance(row, dict) and row.keys() >= {"path", "shard", "offset", "digest"}
