"""The classes, images and splits of a folder."""

import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from os.path import basename
from pathlib import PurePath

import numpy as np

from finetune.data.datasets.class_changes import NO_CHANGES, ClassChanges, check_names_exist
from finetune.data.decode import IMAGE_SUFFIXES
from finetune.data.heif import heic_advice
from finetune.data.samples import PathList, Samples
from finetune.data.splits import SPLIT_NAMES
from finetune.data.storage import kind_of, normal_path, refresh, storage_of
from finetune.data.targets import ClassIndex
from finetune.data.walk import SkippedFiles, dangling_links, find_images, holds_runs, num_loose
from finetune.system.file_names import class_name, composed
from finetune.system.messages import WrongUsage, shown, why_name_is_invalid

log = logging.getLogger(__name__)

_MOST_NAMED = 8  # classes that a message lists


def scan(
    root: str | os.PathLike[str],
    class_names: Sequence[str] | None = None,
    skip: bool = False,
    is_logged: bool = True,
    changes: ClassChanges = NO_CHANGES,
) -> tuple[list[str], dict[str, Samples]]:
    """Find the classes and images of a data set.

    `root` holds `train/CLASS/*`, and optionally `val` and `test` with the same layout, or other spellings of these
    names. Or it only holds class folders, which are returned as the split `all`. A class may be named `train`: next to
    other folders of images, a folder of images is a class, and a folder of folders is a split. Classes of the splits
    are matched by name in composed Unicode (NFC).

    Args:
        root: Folder of the data set.
        class_names: The classes in order, for example of a checkpoint; None for the sorted folders of `train`.
        skip: Skip unreadable folders.
        is_logged: Log what else was skipped.
        changes: Class folders to skip, and classes to merge.

    Returns:
        The class names in the order of their indices, and the images of each split, sorted by class and path.

    Raises:
        FileNotFoundError: The folder does not exist.
        OSError: A folder cannot be read.
        ValueError: There are no class folders or no images, or a split has a class that training does not have. Without
            `class_names` also if a class has no training images.
    """
    root = normal_path(root)
    refresh(root)
    exclude = changes.exclude
    if fault := folder_fault(root):
        raise FileNotFoundError(f"the data folder {root!r} {fault}; pass another FOLDER")
    split_dirs = split_folders(root, exclude) or {"all": root}
    if "all" not in split_dirs and "train" not in split_dirs and not class_names:
        names = " and ".join(repr(basename(folder)) for folder in split_dirs.values())
        raise ValueError(
            f"{root} has {names} but no 'train'; put the training images in {root}/train/CLASS"
        )
    class_dirs = {split: named_folders(folder, exclude) for split, folder in split_dirs.items()}
    merged = {
        split: _merge_folders(folders, changes.merge) for split, folders in class_dirs.items()
    }
    is_known = class_names is not None
    if class_names is None:
        _check_folders_exist({root, *split_dirs.values()}, changes)
        first = "train" if "train" in split_dirs else "all"
        class_names = list(merged[first])
        _check_found_classes(split_dirs[first], class_dirs[first], class_names)
    else:
        _check_requested_names(class_names)
    if twice := [name for name, num in Counter(map(composed, class_names)).items() if num > 1]:
        raise WrongUsage(f"data.class_names, for {root}, holds {_class_list(twice)} more than once")
    skipped = SkippedFiles(skip)
    splits: dict[str, Samples] = {}
    for split, folder in split_dirs.items():
        _check_known(folder, merged[split], class_names, is_known)
        in_order = [merged[split].get(composed(name), []) for name in class_names]
        splits[split] = read_split(folder, in_order, split, skipped)
        empty = empty_classes(splits[split], class_names)
        _check_filled(splits[split], empty, split, is_known, heic_advice(skipped.suffixes))
        if empty and is_logged:
            log.warning(
                "%s has no images of %s: its results do not include it",
                folder,
                _class_list(empty),
            )
    if is_logged:
        skipped.log_summary(root)
    return list(class_names), splits


def _check_found_classes(
    folder: str, class_dirs: Mapping[str, str], class_names: Sequence[str]
) -> None:
    """Refuse class folders with invalid names, and fewer than two classes.

    Args:
        folder: The folder of the training images.
        class_dirs: The class folders in it by name.
        class_names: The classes, which are fewer if some are merged.
    """
    _check_names(class_dirs)
    if not class_names:
        raise ValueError(
            f"{folder} has no class folders; put the images of each class in a folder of its name"
        )
    if len(class_names) == 1:
        hint = _only_folder(list(class_dirs.values()))
        raise ValueError(
            f"{folder} holds only the class {class_names[0]!r}; a classifier needs at least two{hint}"
        )


def _only_folder(class_dirs: Sequence[str]) -> str:
    """Return the end of a message if there is one folder, and it has the classes or the splits; else ""."""
    if len(class_dirs) != 1 or num_loose(class_dirs[0]):
        return ""
    names = [basename(folder) for folder in class_folders(class_dirs[0])]
    has_data = len(names) > 1 or any(name.lower() in SPLIT_NAMES for name in names)
    listed = ", ".join(map(repr, names[:3]))
    return f"; {class_dirs[0]} holds {listed}: pass that folder" if has_data else ""


def folder_fault(root: str) -> str:
    """Return why a path is not a folder, for a message; "" if it is one."""
    kind = kind_of(root)
    if kind == "folder":
        return ""
    return "does not exist" if kind in (None, "link") else "is a file, not a folder"


def class_folders(folder: str, exclude: Collection[str] = ()) -> list[str]:
    """Return the folders in a folder, sorted by name, without hidden folders, excluded folders and runs."""
    excluded = set(map(composed, exclude))
    names = sorted(
        entry.name
        for entry in storage_of(folder).entries(folder)
        if entry.is_folder and not entry.name.startswith(".")
    )
    paths = [
        normal_path(os.path.join(folder, name))
        for name in names
        if class_name(name) not in excluded
    ]
    return [path for path in paths if not holds_runs(path)]


def _check_folders_exist(folders: Iterable[str], changes: ClassChanges) -> None:
    """Check that the class folders that options name exist."""
    if changes.exclude or changes.merge:
        existing = {
            class_name(entry.name)
            for folder in folders
            for entry in storage_of(folder).entries(folder)
        }
        check_names_exist("--data.exclude", changes.exclude, existing, "class folder")
        check_names_exist("--data.merge", changes.merge, existing, "class folder")


def _merge_folders(class_dirs: Mapping[str, str], merge: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the folders of each class, which are several if classes are merged. Classes are sorted by name."""
    merged: dict[str, list[str]] = {}
    for name, folder in class_dirs.items():
        merged.setdefault(merge.get(name, name), []).append(folder)
    return dict(sorted(merged.items()))


def named_folders(folder: str, exclude: Collection[str] = ()) -> dict[str, str]:
    """Return the class folders in a folder by class name, sorted, without excluded folders.

    Raises:
        ValueError: Two names differ in Unicode composition only.
    """
    by_name: dict[str, str] = {}
    for path in class_folders(folder, exclude):
        name = class_name(basename(path))
        if name in by_name:
            raise ValueError(f"{folder} has two folders of the class {name!r}: keep one of them")
        by_name[name] = path
    return dict(sorted(by_name.items()))


def _check_names(class_dirs: Mapping[str, str]) -> None:
    """Refuse class names that metrics, results and checkpoints cannot store as one line of text."""
    for name, folder in class_dirs.items():
        if reason := why_name_is_invalid(name):
            raise ValueError(f"the class folder {os.fsencode(folder)!r} {reason}: rename it")


def _check_requested_names(class_names: Sequence[str]) -> None:
    """Refuse names of a command line or checkpoint that no class folder can have. They become parts of paths."""
    for name in class_names:
        if (
            not name
            or why_name_is_invalid(name)
            or PurePath(name).is_absolute()
            or ".." in PurePath(name).parts
        ):
            raise WrongUsage(f"data.class_names: '{shown(name)}' is not the name of a class folder")


def split_folders(root: str, exclude: Collection[str] = ()) -> dict[str, str]:
    """Return the folder of each split, without excluded folders; {} if `root` only holds class folders."""
    folders = class_folders(root, exclude)
    named = [folder for folder in folders if basename(folder).lower() in SPLIT_NAMES]
    classes = (
        [basename(folder) for folder in folders if folder not in named and _is_class(folder)]
        if named
        else []
    )
    split_named = [folder for folder in named if class_folders(folder)]
    if classes and not split_named:
        return {}
    if classes:
        splits = " and ".join(repr(basename(folder)) for folder in split_named)
        raise ValueError(
            f"{root} has the split folders {splits}, and {_class_list(classes)} next to them: move these into the "
            "split folders or elsewhere, or rename a class folder that has the name of a split"
        )
    split_dirs: dict[str, str] = {}
    for folder in named:
        split = SPLIT_NAMES[basename(folder).lower()]
        if split in split_dirs:
            both = f"{basename(split_dirs[split])!r} and {basename(folder)!r}"
            raise ValueError(f"{root} holds both {both}: keep one of them")
        split_dirs[split] = folder
    return split_dirs


def _is_class(folder: str) -> bool:
    try:
        return num_loose(folder) > 0
    except OSError:  # an unreadable folder, such as `lost+found` of a disk
        return False


def _check_known(
    folder: str, class_dirs: Mapping[str, list[str]], class_names: Sequence[str], is_known: bool
) -> None:
    """Refuse class folders of a split that are not among the training classes.

    Args:
        folder: The folder of the split.
        class_dirs: The folders of its classes by name.
        class_names: The training classes.
        is_known: Whether the classes were passed as an argument, for example from a checkpoint.
    """
    known = set(map(composed, class_names))
    unknown = [name for name in class_dirs if name not in known]
    if not unknown:
        return
    lower = {name.lower(): name for name in class_names}
    hints = [
        f"{name!r} is {lower[name.lower()]!r} there" for name in unknown if name.lower() in lower
    ]
    if not is_known:
        hints.append(_exclusion_advice(unknown))
    message = (
        f"{folder} has {_class_list(unknown)}, not in the training classes {', '.join(class_names)}"
    )
    raise ValueError("; ".join([message, *hints]))


def _check_filled(
    samples: Samples, empty: Sequence[str], split: str, is_known: bool, advice: str
) -> None:
    """Refuse a split `all` without images, and empty training classes unless the classes were passed as an argument.

    Args:
        samples: The images of the split.
        empty: The classes without images.
        split: Its name.
        is_known: Whether the classes were passed as an argument.
        advice: The end of the message: what to install for skipped files.
    """
    must_be_filled = split in ("train", "all") and not is_known
    if empty and (must_be_filled or (split == "all" and not len(samples))):
        supported = " ".join(sorted(IMAGE_SUFFIXES))
        message = (
            f"{samples.folder} has no images of {_class_list(empty)}; supported are {supported}"
        )
        raise ValueError(
            f"{message}; where {'they are' if len(empty) > 1 else 'it is'} no class, {_exclusion_advice(empty)}{advice}"
        )


def empty_classes(samples: Samples, class_names: Sequence[str]) -> list[str]:
    """Return the names of the classes without images in a split."""
    counts = samples.targets.counts().tolist()
    return [name for name, num in zip(class_names, counts, strict=True) if num == 0]


def read_split(
    folder: str, class_dirs: Sequence[Sequence[str]], split: str, skipped: SkippedFiles
) -> Samples:
    """Return the images of a split, sorted by class and path.

    Args:
        folder: The folder of the split.
        class_dirs: The folders of each class, K; several if classes are merged.
        split: Name of the split.
        skipped: Collects the files and folders that are skipped.

    Raises:
        OSError: A folder cannot be read, and `skipped.skip_unreadable` is false.
    """
    skipped.unread += [f"{link}: a dangling link" for link in dangling_links(folder)]
    if loose := num_loose(folder):
        skipped.loose[folder] = loose
    labels: list[int] = []
    paths: list[str] = []
    for label, folders in enumerate(class_dirs):
        paths_of_class = [path for inside in folders for path in find_images(inside, skipped)]
        paths += paths_of_class
        labels += [label] * len(paths_of_class)
    return Samples(
        PathList(paths),
        ClassIndex(np.array(labels, np.int64), len(class_dirs)),
        origin=f"its {basename(folder)} folder",
        folder=folder,
        tag="" if split == "all" else f"{basename(folder)}/",
    )


def _exclusion_advice(names: Sequence[str]) -> str:
    """Return advice to delete or exclude the folders of these classes."""
    if len(names) == 1:
        return f"delete the folder, or skip it with --data.exclude {names[0]}"
    more = ", …" if len(names) > _MOST_NAMED else ""
    listed = f"'[{', '.join(names[:_MOST_NAMED])}{more}]'"
    return f"delete the folders, or skip them with --data.exclude {listed}"


def _class_list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"the class{'es' if len(names) > 1 else ''} {', '.join(map(repr, names[:_MOST_NAMED]))}{more}"
