"""The place of the images of a data module: a folder, an archive, or a table of their paths."""

import os
from collections.abc import Collection, Mapping
from typing import Any

from finetune.data.addresses import is_address, is_dataset, real_place

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")  # suffixes
RUNS_MARK = ".finetune"  # an empty file in a folder of runs, whose images are no data
# Arguments that have a meaning only for a table.
_OF_TABLES = ("table", "columns", "labels", "label_separator")


def is_archive(place: str) -> bool:
    """Return whether a place of images is an archive, by its suffix; a folder of this name is none."""
    return place.lower().endswith(ARCHIVES) and not os.path.isdir(place)


def is_copied(place: str) -> bool:
    """Return whether the images of a place are read from a copy in a cache: those of an archive or of the hub."""
    return is_dataset(place) or is_archive(place)


def place_of(arguments: Mapping[str, Any]) -> str | None:
    """Return the table of a data module, or else its folder, from its arguments; None for neither."""
    return arguments.get("table") or arguments.get("root")


def address_in(arguments: Mapping[str, Any]) -> str | None:
    """Return the address of the images, or of the folder that the paths of a table are relative to; None for none."""
    places = (arguments.get("root"), arguments.get("table"))
    return next((place for place in places if is_address(place)), None)


def at_place(arguments: Mapping[str, Any], explicit: Collection[str]) -> dict[str, Any]:
    """Return the arguments of an earlier data module, for a command that names another place of the images.

    A folder replaces a table, and a table replaces the folder that its paths were relative to.

    Args:
        arguments: The arguments of the earlier data module.
        explicit: Names of the arguments that the command sets.
    """
    dropped: Collection[str] = ()
    if "table" in explicit and "root" not in explicit:
        dropped = ("root",)
    elif "root" in explicit and "table" not in explicit:
        dropped = _OF_TABLES
    return {name: value for name, value in arguments.items() if name not in dropped}


def for_other_place(arguments: Mapping[str, Any], place: str | None) -> dict[str, Any]:
    """Return the arguments of an earlier data module for a command that may name another data set.

    Corrections, groups and folds belong to the images of their data set: another one has none. A regular expression of
    an untrusted checkpoint could take for ever.

    Args:
        arguments: The arguments of the earlier data module.
        place: The folder or table that the command names; None for none.
    """
    before = place_of(arguments)
    if place is None or (before and real_place(place) == real_place(before)):
        return dict(arguments)
    return {
        name: value
        for name, value in arguments.items()
        if name not in ("corrections", "correct_test", "group_by", "num_folds", "fold")
    }
