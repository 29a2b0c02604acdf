"""Recognises the folders that `finetune pack` writes, by their index and shards. Imports nothing heavy."""

import json
import os
from collections.abc import Callable

# A line of JSON for each image: its path and the place of its bytes; for a packed table, also its other columns.
INDEX = "index.jsonl"
_LONGEST_LINE = 2**20  # bytes; other files may have this name


def shard_name(number: int) -> str:
    """Return the name of a shard, from 0."""
    return f"shard-{number:05}.tar"


def is_pack(folder: str, is_file: Callable[[str], bool] = os.path.isfile) -> bool:
    """Return whether a folder is packed.

    Args:
        folder: The folder.
        is_file: Whether a path is that of a file.
    """
    return all(is_file(f"{folder}/{name}") for name in (INDEX, shard_name(0)))


def pack_above(path: str) -> str | None:
    """Return the packed folder on a local disk that a path lies in, or that it is; None if there is none."""
    folder = path.rstrip("/")
    while folder and not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    return folder if folder and is_pack(folder) else None


def table_in_pack(folder: str) -> str | None:
    """Return the index of a packed folder on a local disk if it is a table of images with labels, else None."""
    if not is_pack(folder):
        return None
    index = f"{folder.rstrip('/')}/{INDEX}"
    with open(index, "rb") as file:
        try:
            row = json.loads(file.readline(_LONGEST_LINE))
        except ValueError:  # reported when it is read
            return None
    return index if has_label(row) else None


def has_label(row: object) -> bool:
    """Return whether a row of an index has labels, as those of a packed table do."""
    return isinstance(row, dict) and "label" in row
