"""Whether a folder is one level too high or too low: which one was probably meant."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from finetune.data.walk import is_picture, num_loose

TRAIN_NAMES = ("train", "training")  # in any case: folders of the split that every data set has


def lower(folder: Path, entries: Sequence[Path], inside: Callable[[Path], Sequence[Path]]) -> str:
    """Return the end of a message where the only folder in `folder` holds the classes, or the splits; else "".

    Args:
        folder: That was named.
        entries: The folders in it.
        inside: Gives the folders in a folder.
    """
    if len(entries) != 1 or not _holds_folders(entries[0], inside, least=1):
        return ""
    names = [entry.name for entry in inside(entries[0])]
    is_data = len(names) > 1 or names[0].lower() in TRAIN_NAMES
    return f"; {entries[0]} holds {_named(names)}: give that folder" if is_data else ""


def upper(folder: Path, inside: Callable[[Path], Sequence[Path]]) -> str:
    """Return the end of a message where `folder` holds pictures alone, beside other class folders; else ""."""
    place = folder.absolute().parent
    try:
        num, names = num_loose(folder), [entry.name for entry in inside(place)]
    except OSError:
        return ""
    return (
        f"; {num} pictures lie loose in it, and {place} holds {_named(names)}: give that one"
        if num and len(names) > 1
        else ""
    )


def too_high(folder: Path, classes: Sequence[Path], inside: Callable[[Path], Sequence[Path]]) -> str:
    """Return what to warn of where the classes look like data sets: folders of folders, without pictures; else "".

    Args:
        folder: That was named.
        classes: The folders in it.
        inside: Gives the folders in a folder.
    """
    data_sets = [entry for entry in classes if _holds_folders(entry, inside, least=2)]
    if not data_sets or len(data_sets) < len(classes):
        return ""
    first = data_sets[0]
    names = _named([entry.name for entry in inside(first)])
    return (
        f"{folder}: all {len(classes)} classes are folders of folders ({first.name} holds {names}); if {first.name} is "
        f"a data set, give {first}"
    )


def _holds_folders(folder: Path, inside: Callable[[Path], Sequence[Path]], least: int) -> bool:
    try:
        with os.scandir(folder) as entries:  # not to the end: a class may have a million pictures
            if any(is_picture(entry.name) for entry in entries):
                return False
        return len(inside(folder)) >= least
    except OSError:
        return False


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(map(repr, names[:3]))}{more}"
