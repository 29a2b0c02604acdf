"""The images of a folder: train/CLASS/*, and optionally val and test with the same layout, or class folders only."""

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from os.path import basename

import numpy as np

from finetune.data.faults import Fault
from finetune.data.image_files import entries, file_stats, kind_of, normal_path
from finetune.data.listing import SPLITS, Listing, ScanOptions, named_classes
from finetune.data.local_folders import local_folder
from finetune.data.mirror import original
from finetune.data.samples import PathList
from finetune.data.splits import SPLIT_NAMES
from finetune.data.tables.table_file import SUFFIXES
from finetune.data.walk import Skipped, find_images, holds_runs, missing_file, num_loose
from finetune.system.file_names import class_name
from finetune.system.messages import counted, why_name_is_invalid


@dataclass(frozen=True)
class _ClassFolder:
    split: str
    name: str  # of the class, before the merge
    path: str


def list_folder(place: str, options: ScanOptions) -> Listing:
    """List the images of the class folders in a folder.

    `train`, `val` and `test` may have other spellings. A class may be named `train`: next to other folders of images, a
    folder of images is a class, and a folder of folders is a split. Classes of the splits are matched by name in
    composed Unicode (NFC).

    Args:
        place: Folder of the data set, or a place that `local_folder` takes.
        options: The classes to exclude and to merge.

    Raises:
        FileNotFoundError: The folder does not exist.
        OSError: The folder cannot be read.
        ValueError: It has no class folders, or an ambiguous layout.
    """
    root = normal_path(local_folder(place))
    kind = kind_of(root)
    if kind != "folder":
        fault = "does not exist" if kind in (None, "link") else "is a file, not a folder"
        tables = " ".join(SUFFIXES)
        raise FileNotFoundError(
            f"{place!r} {fault}: pass a folder of images, or a table of them ({tables})"
        )
    split_dirs = _split_folders(root, options.exclude) or {"all": root}
    folders = [
        class_folder
        for split, folder in split_dirs.items()
        for class_folder in _class_folders(split, folder, options.exclude)
    ]
    trained = [each for each in folders if each.split in ("all", "train")]
    if not folders:
        raise ValueError(_no_classes(split_dirs.get("train", root)))
    skipped = Skipped()
    for folder in dict.fromkeys([root, *split_dirs.values()]):
        skipped.look_beside(folder)
    paths, set_of = _images(folders, skipped)
    stats = file_stats(paths)
    lost = np.flatnonzero(~stats.is_regular)
    faults = [missing_file(paths[i], exists=stats.sizes[i] >= 0) for i in lost.tolist()]
    if faults:
        is_there = np.flatnonzero(stats.is_regular)
        paths = paths.take(is_there)
        set_of = set_of[is_there]
        stats = stats.take(is_there)
    # metrics, results and checkpoints store a class name as one line of text
    faults += [
        Fault(
            os.path.dirname(each.path),
            f"the class folder {os.fsencode(each.name)!r} {reason}",
            "rename it",
        )
        for each in folders
        if (reason := why_name_is_invalid(each.name))
    ]
    label_sets = [options.changed([each.name]) for each in folders]
    split_of = np.array([SPLITS.index(each.split) for each in folders], np.int8)[set_of]
    with_images = {SPLITS[k] for k in np.unique(split_of).tolist()}
    empty = [folder for split, folder in split_dirs.items() if split not in with_images]
    notes = [f"{original(folder)} has no images" for folder in empty]
    if "all" not in split_dirs:
        notes += _unused(root, split_dirs.values(), options.exclude)
    return Listing(
        place=place,
        folder=root,
        paths=paths,
        label_sets=label_sets,
        set_of=set_of,
        split_of=split_of,
        stats=stats,
        existing=_folder_names([root, *split_dirs.values()]),
        needed=sorted({label for each in trained for label in options.changed([each.name])}),
        has_splits="all" not in split_dirs,
        faults=(*skipped.faults, *faults),
        notes=(*skipped.notes(root), *notes),
        hint=_only_folder([each.path for each in trained]),
        supported=f"; {skipped.supported()}",
    )


def _images(folders: Sequence[_ClassFolder], skipped: Skipped) -> tuple[PathList, np.ndarray]:
    """Return the images in class folders, and the index of the folder of each, (N,) int32."""
    lists = [PathList(find_images(each.path, skipped)) for each in folders]
    index = np.arange(len(folders), dtype=np.int32)
    return PathList.joined(lists), np.repeat(index, [*map(len, lists)])


def _unused(root: str, used: Collection[str], exclude: Collection[str]) -> Iterator[str]:
    """Yield a note for each folder of images next to the folders of the splits, such as a misspelt split."""
    for folder in class_folders(root, exclude):
        if folder not in used and any(find_images(folder, Skipped())):
            yield (
                f"{original(folder)} has images that are not used: "
                "the folders of the splits are called train, val and test"
            )


def _no_classes(folder: str) -> str:
    """Return the message that a folder has no class folders."""
    num = num_loose(folder)
    hint = f"; {counted(num, 'image lies', 'images lie')} loose in it" if num else ""
    return f"{original(folder)} has no class folders; put the images of each class in a folder of its name{hint}"


def _only_folder(class_dirs: Sequence[str]) -> str:
    """Return the end of a message if there is one folder, and it has the classes or the splits; else ""."""
    if len(class_dirs) != 1 or num_loose(class_dirs[0]):
        return ""
    names = [basename(folder) for folder in class_folders(class_dirs[0])]
    has_data = len(names) > 1 or any(name.lower() in SPLIT_NAMES for name in names)
    listed = ", ".join(map(repr, names[:3]))
    return f"; {original(class_dirs[0])} holds {listed}: pass that folder" if has_data else ""


def class_folders(folder: str, exclude: Collection[str] = ()) -> list[str]:
    """Return the folders in a folder, sorted by name, without hidden folders, excluded folders and runs."""
    names = sorted(
        entry.name
        for entry in entries(folder)
        if entry.is_folder and not entry.name.startswith(".")
    )
    paths = [
        normal_path(os.path.join(folder, name)) for name in names if class_name(name) not in exclude
    ]
    return [path for path in paths if not holds_runs(path)]


def _folder_names(folders: Iterable[str]) -> set[str]:
    return {
        class_name(entry.name) for folder in folders for entry in entries(folder) if entry.is_folder
    }


def _class_folders(split: str, folder: str, exclude: Collection[str]) -> list[_ClassFolder]:
    """Return the class folders of a split by class name, sorted, without excluded ones.

    Raises:
        ValueError: Two names differ in Unicode composition only.
    """
    by_name: dict[str, str] = {}
    for path in class_folders(folder, exclude):
        name = class_name(basename(path))
        if name in by_name:
            raise ValueError(
                f"{original(folder)} has two folders of the class {name!r}: keep one of them"
            )
        by_name[name] = path
    return [_ClassFolder(split, name, path) for name, path in sorted(by_name.items())]


def _split_folders(root: str, exclude: Collection[str]) -> dict[str, str]:
    """Return the folder of each split, without excluded folders; {} if `root` only holds class folders."""
    folders = class_folders(root, exclude)
    named = [folder for folder in folders if basename(folder).lower() in SPLIT_NAMES]
    if not named:
        return {}
    classes = [basename(folder) for folder in folders if folder not in named and _is_class(folder)]
    split_named = [folder for folder in named if class_folders(folder)]
    if classes and not split_named:
        return {}
    if classes:
        splits = " and ".join(repr(basename(folder)) for folder in split_named)
        raise ValueError(
            f"{original(root)} has the split folders {splits}, and {named_classes(classes)} next to them: "
            "move these into the split folders or elsewhere, or rename a class folder that has the name of a split"
        )
    split_dirs: dict[str, str] = {}
    for folder in named:
        split = SPLIT_NAMES[basename(folder).lower()]
        if split in split_dirs:
            both = f"{basename(split_dirs[split])!r} and {basename(folder)!r}"
            raise ValueError(f"{original(root)} holds both {both}: keep one of them")
        split_dirs[split] = folder
    return {split: split_dirs[split] for split in SPLITS if split in split_dirs}


def _is_class(folder: str) -> bool:
    try:
        return num_loose(folder) > 0
    except OSError:  # an unreadable folder, such as `lost+found` of a disk
        return False
