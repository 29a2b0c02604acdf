"""Hints for a data folder that is one level too high or too low: the folder that was probably meant."""

from collections.abc import Callable, Sequence
from os.path import basename, dirname

from finetune.data.addresses import StorageError
from finetune.data.storage import storage_of
from finetune.data.walk import is_image_file, num_loose
from finetune.system.messages import WrongUsage, counted

TRAIN_NAMES = ("train", "training")  # in any case: folders of the split that every data set has


def hint_one_level_down(
    folder: str, entries: Sequence[str], inside: Callable[[str], Sequence[str]]
) -> str:
    """Return the end of an error message if the only folder in `folder` holds the classes or the splits; else "".

    Args:
        folder: The folder that the user named.
        entries: The folders in it.
        inside: Returns the folders in a folder.
    """
    if len(entries) != 1 or not _holds_folders(entries[0], inside, least=1):
        return ""
    names = [basename(entry) for entry in inside(entries[0])]
    is_data = len(names) > 1 or names[0].lower() in TRAIN_NAMES
    return f"; {entries[0]} holds {_listed(names)}: pass that folder" if is_data else ""


def hint_one_level_up(folder: str, inside: Callable[[str], Sequence[str]]) -> str:
    """Return the end of an error message if `folder` holds only images, next to other class folders; else ""."""
    place = dirname(storage_of(folder).absolute(folder))
    try:
        num = num_loose(folder)
        names = [basename(entry) for entry in inside(place)]
    # of another folder, or of no folder above a repository
    except (OSError, StorageError, WrongUsage):
        return ""
    if num == 0 or len(names) < 2:
        return ""
    loose = counted(num, "image is", "images are")
    return f"; {loose} in it, and {place} has the folders {_listed(names)}: pass that folder"


def warning_of_data_sets(
    folder: str, classes: Sequence[str], inside: Callable[[str], Sequence[str]]
) -> str:
    """Return a warning if all classes look like data sets, that is, hold folders and no images; else "".

    Args:
        folder: The folder that the user named.
        classes: The folders in it.
        inside: Returns the folders in a folder.
    """
    data_sets = [entry for entry in classes if _holds_folders(entry, inside, least=2)]
    if not data_sets or len(data_sets) < len(classes):
        return ""
    first = data_sets[0]
    name = basename(first)
    names = _listed([basename(entry) for entry in inside(first)])
    return (
        f"{folder}: all {len(classes)} classes are folders of folders ({name} holds {names}); if {name} is "
        f"a data set, pass {first}"
    )


def _holds_folders(folder: str, inside: Callable[[str], Sequence[str]], least: int) -> bool:
    try:
        # only up to the first image: a class may have a million
        if any(is_image_file(entry.name) for entry in storage_of(folder).entries(folder)):
            return False
        return len(inside(folder)) >= least
    except OSError:
        return False


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(map(repr, names[:3]))}{more}"
