"""The classes, images and splits of a folder."""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from os.path import basename
from pathlib import PurePath

import numpy as np

from finetune.data.data_set import DataSet, check_names_exist, empty_classes
from finetune.data.decode import IMAGE_SUFFIXES
from finetune.data.faults import Fault
from finetune.data.heif import heic_advice
from finetune.data.image_files import entries, kind_of, normal_path, refresh
from finetune.data.local_folders import local_folder
from finetune.data.samples import PathList, Samples
from finetune.data.splits import SPLIT_NAMES
from finetune.data.tables.table_file import SUFFIXES
from finetune.data.targets import ClassIndex
from finetune.data.walk import Skipped, dangling_links, find_images, holds_runs, num_loose
from finetune.system.file_names import class_name, composed
from finetune.system.messages import WrongUsage, counted, shown, why_name_is_invalid

_MOST_NAMED = 8  # classes that a message lists

# From a split to its classes, and from these to their folders, which are several if classes are merged.
_Folders = Mapping[str, Mapping[str, list[str]]]


def scan_folder(
    place: str,
    class_names: Sequence[str] | None = None,
    exclude: Collection[str] = (),
    merge: Mapping[str, str] | None = None,
) -> DataSet:
    """Find the classes and images of a data set.

    It has `train/CLASS/*`, and optionally `val` and `test` with the same layout, or other spellings of these names. Or
    it only has class folders, whose images are the split `all`. A class may be named `train`: next to other folders of
    images, a folder of images is a class, and a folder of folders is a split. Classes of the splits are matched by name
    in composed Unicode (NFC).

    Args:
        place: Folder of the data set, or a place that `local_folder` takes.
        class_names: The classes in order, for example of a checkpoint; None for the sorted folders. Then faults are
            classes that have no training images.
        exclude: Class folders to skip.
        merge: New names of class folders. Those with one new name are one class.

    Raises:
        FileNotFoundError: The folder does not exist.
        OSError: The folder cannot be read.
        ValueError: It has no class folders, or an ambiguous layout.
    """
    root = normal_path(local_folder(place))
    refresh(root)
    if fault := _folder_fault(root):
        raise FileNotFoundError(
            f"{root!r} {fault}: pass a folder of images, or a table of them ({' '.join(SUFFIXES)})"
        )
    if class_names is not None:
        _check_requested_names(class_names, root)
    split_dirs = _split_folders(root, exclude) or {"all": root}
    class_dirs = {split: _named_folders(folder, exclude) for split, folder in split_dirs.items()}
    if class_names is None and (exclude or merge):
        _check_folders_exist({root, *split_dirs.values()}, exclude, merge or {})
    folders = {split: _merged(dirs, merge or {}) for split, dirs in class_dirs.items()}
    found = {name for of_split in folders.values() for name in of_split}
    if not found:
        folder = split_dirs.get("train", root)
        raise ValueError(f"{folder} has {_no_classes(folder)}")
    faults = [] if class_names else _class_faults(root, split_dirs, class_dirs, folders)
    known = class_names or sorted(folders.get("train", folders.get("all", {})))
    faults += _unknown_classes(split_dirs, folders, known, is_known=class_names is not None)
    unknown = found - set(map(composed, known))
    names = [*class_names, *sorted(unknown)] if class_names else sorted(found)
    skipped = Skipped()
    splits = {
        split: _read_split(
            root, folder, [folders[split].get(composed(n), []) for n in names], skipped
        )
        for split, folder in split_dirs.items()
    }
    notes = skipped.notes(root)
    for split, folder in split_dirs.items():
        empty = [
            name for name in empty_classes(splits[split].targets, names) if name not in unknown
        ]
        is_needed = split in ("train", "all") and not class_names
        if empty and (is_needed or (split == "all" and not len(splits[split]))):
            faults.append(_empty_fault(folder, empty, heic_advice(skipped.suffixes)))
        elif empty:
            lacking = _class_list(empty)
            notes.append(f"{folder} has no images of {lacking}: its results do not include it")
    return DataSet(
        class_names=names,
        splits=splits,
        place=place,
        folder=root,
        has_splits="all" not in splits,
        faults=(*skipped.faults, *faults),
        notes=tuple(notes),
    )


def _folder_fault(root: str) -> str:
    """Return why a path is not a folder, for a message; "" if it is one."""
    kind = kind_of(root)
    if kind == "folder":
        return ""
    return "does not exist" if kind in (None, "link") else "is a file, not a folder"


def _no_classes(folder: str) -> str:
    """Return what a folder without class folders has, for a message."""
    num = num_loose(folder)
    hint = f"; {counted(num, 'image lies', 'images lie')} loose in it" if num else ""
    return f"no class folders; put the images of each class in a folder of its name{hint}"


def _class_faults(
    root: str,
    split_dirs: Mapping[str, str],
    class_dirs: Mapping[str, Mapping[str, str]],
    folders: _Folders,
) -> list[Fault]:
    """Return what is wrong with the classes of a data set for training: no split, invalid names, fewer than two."""
    first = "train" if "train" in split_dirs else "all"
    if first not in split_dirs:
        names = " and ".join(repr(basename(folder)) for folder in split_dirs.values())
        hint = f"put the training images in {root}/train/CLASS"
        return [Fault(root, f"it has {names} but no 'train'", hint)]
    # metrics, results and checkpoints store a class name as one line of text
    faults = [
        Fault(folder, f"the class folder {os.fsencode(name)!r} {reason}", "rename it")
        for split, folder in split_dirs.items()
        for name in class_dirs[split]
        if (reason := why_name_is_invalid(name))
    ]
    folder = split_dirs[first]
    if not folders[first]:
        faults.append(Fault(folder, f"it has {_no_classes(folder)}"))
    elif len(folders[first]) == 1:
        text = f"it holds only the class {next(iter(folders[first]))!r}"
        hint = f"a classifier needs at least two{_only_folder(list(class_dirs[first].values()))}"
        faults.append(Fault(folder, text, hint))
    return faults


def _only_folder(class_dirs: Sequence[str]) -> str:
    """Return the end of a message if there is one folder, and it has the classes or the splits; else ""."""
    if len(class_dirs) != 1 or num_loose(class_dirs[0]):
        return ""
    names = [basename(folder) for folder in class_folders(class_dirs[0])]
    has_data = len(names) > 1 or any(name.lower() in SPLIT_NAMES for name in names)
    listed = ", ".join(map(repr, names[:3]))
    return f"; {class_dirs[0]} holds {listed}: pass that folder" if has_data else ""


def class_folders(folder: str, exclude: Collection[str] = ()) -> list[str]:
    """Return the folders in a folder, sorted by name, without hidden folders, excluded folders and runs."""
    excluded = set(map(composed, exclude))
    names = sorted(
        entry.name
        for entry in entries(folder)
        if entry.is_folder and not entry.name.startswith(".")
    )
    paths = [
        normal_path(os.path.join(folder, name))
        for name in names
        if class_name(name) not in excluded
    ]
    return [path for path in paths if not holds_runs(path)]


def _check_folders_exist(
    folders: Iterable[str], exclude: Collection[str], merge: Mapping[str, str]
) -> None:
    """Check that the class folders that options name exist."""
    existing = {
        class_name(entry.name) for folder in folders for entry in entries(folder) if entry.is_folder
    }
    check_names_exist("--data.exclude", exclude, existing)
    check_names_exist("--data.merge", merge, existing)


def _merged(class_dirs: Mapping[str, str], merge: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the folders of each class, which are several if classes are merged."""
    merged: dict[str, list[str]] = {}
    for name, folder in class_dirs.items():
        merged.setdefault(merge.get(name, name), []).append(folder)
    return merged


def _named_folders(folder: str, exclude: Collection[str]) -> dict[str, str]:
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


def _check_requested_names(class_names: Sequence[str], root: str) -> None:
    """Refuse names of a command line or checkpoint that no class folder can have. They become parts of paths."""
    for name in class_names:
        if (
            not name
            or why_name_is_invalid(name)
            or PurePath(name).is_absolute()
            or ".." in PurePath(name).parts
        ):
            raise WrongUsage(f"data.class_names: '{shown(name)}' is not the name of a class folder")
    if twice := [name for name, num in Counter(map(composed, class_names)).items() if num > 1]:
        raise WrongUsage(f"data.class_names, for {root}, holds {_class_list(twice)} more than once")


def _split_folders(root: str, exclude: Collection[str]) -> dict[str, str]:
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
    return {split: split_dirs[split] for split in ("train", "val", "test") if split in split_dirs}


def _is_class(folder: str) -> bool:
    try:
        return num_loose(folder) > 0
    except OSError:  # an unreadable folder, such as `lost+found` of a disk
        return False


def _unknown_classes(
    split_dirs: Mapping[str, str], folders: _Folders, class_names: Sequence[str], is_known: bool
) -> list[Fault]:
    """Return a fault for each split with class folders that are not among the training classes.

    Args:
        split_dirs: The folder of each split.
        folders: The classes of each split.
        class_names: The training classes.
        is_known: Whether the classes were passed as an argument, for example from a checkpoint.
    """
    known = set(map(composed, class_names))
    lower = {name.lower(): name for name in class_names}
    faults = []
    for split, folder in split_dirs.items():
        unknown = [name for name in folders[split] if name not in known]
        if not unknown or not known:
            continue
        hints = [f"{n!r} is {lower[n.lower()]!r} there" for n in unknown if n.lower() in lower]
        if not is_known:
            hints.append(_exclusion_advice(unknown))
        text = (
            f"it has {_class_list(unknown)}, not in the training classes {', '.join(class_names)}"
        )
        faults.append(Fault(folder, text, "; ".join(hints)))
    return faults


def _empty_fault(folder: str, empty: Sequence[str], advice: str) -> Fault:
    """Return the fault of a folder whose classes `empty` have no images to train on or to evaluate.

    Args:
        folder: The folder.
        empty: The classes.
        advice: The end of the message: what to install for skipped files.
    """
    supported = " ".join(sorted(IMAGE_SUFFIXES))
    text = f"it has no images of {_class_list(empty)}; supported are {supported}"
    where = "they are" if len(empty) > 1 else "it is"
    return Fault(folder, text, f"where {where} no class, {_exclusion_advice(empty)}{advice}")


def _read_split(
    root: str, folder: str, class_dirs: Sequence[Sequence[str]], skipped: Skipped
) -> Samples:
    """Return the images of a split, sorted by class and path.

    Args:
        root: The folder of the data set.
        folder: The folder of the split.
        class_dirs: The folders of each class, K; several if classes are merged.
        skipped: Collects the files and folders that are skipped.
    """
    skipped.links += dangling_links(folder)
    if loose := num_loose(folder):
        skipped.loose[folder] = loose
    labels: list[int] = []
    paths: list[str] = []
    for label, folders in enumerate(class_dirs):
        num_before = len(paths)
        for inside in folders:
            paths.extend(find_images(inside, skipped))
        labels += [label] * (len(paths) - num_before)
    return Samples(
        PathList(paths), ClassIndex(np.array(labels, np.int64), len(class_dirs)), folder=root
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
