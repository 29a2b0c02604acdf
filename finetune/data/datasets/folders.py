"""The images of a folder: train/CLASS/*, and optionally val and test with the same layout, or class folders only."""

import os
from collections.abc import Collection, Iterator, Sequence
from os.path import basename

import numpy as np

from finetune.data.faults import Fault
from finetune.data.image_files import FileStats, file_stats, kind_of, normal_path
from finetune.data.listing import SPLITS, Listing, ScanOptions, named_classes
from finetune.data.local_folders import local_folder
from finetune.data.samples import PathList
from finetune.data.splits import SPLIT_NAMES
from finetune.data.tables.table_file import SUFFIXES
from finetune.data.walk import Skipped, find_images, holds_runs, is_image_file, visible_entries
from finetune.system.file_names import composed
from finetune.system.messages import counted, why_name_is_invalid


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
    has_splits = "all" not in split_dirs
    folders = [
        (split, folder)
        for split, split_dir in split_dirs.items()
        for folder in class_folders(split_dir, options.exclude)
    ]
    if not folders:
        raise ValueError(_no_classes(split_dirs.get("train", root)))
    skipped = Skipped()
    lists = [PathList(find_images(folder, skipped)) for _, folder in folders]
    paths = PathList.joined(lists)
    folder_of = np.repeat(np.arange(len(folders), dtype=np.int32), [*map(len, lists)])
    stats = file_stats(paths)
    faults = [*skipped.faults, *_missing_files(paths, stats)]
    is_there = np.flatnonzero(stats.is_regular)
    folder_of = folder_of[is_there]
    split_of = np.array([SPLITS.index(split) for split, _ in folders], np.int8)[folder_of]
    labels = [options.changed([_class_of(folder)]) for _, folder in folders]
    notes = skipped.notes(root)
    existing: set[str] = set()
    for folder in dict.fromkeys([root, *split_dirs.values()]):
        existing |= {composed(each.name) for each in visible_entries(folder) if each.is_folder}
        faults += _dangling_links(folder)
        if num := _num_loose(folder):
            images = counted(num, "image")
            notes.append(f"skipped {images} outside of class folders, in {folder}")
    faults += _invalid_names(folders)
    with_images = {SPLITS[k] for k in np.unique(split_of).tolist()}
    empty = [folder for split, folder in split_dirs.items() if split not in with_images]
    notes += [f"{folder} has no images" for folder in empty]
    if has_splits:
        notes += _unused(root, split_dirs.values(), options.exclude)
    trained = [folder for split, folder in folders if split in ("all", "train")]
    return Listing(
        place=place,
        folder=root,
        paths=paths.take(is_there),
        labels=[labels[k] for k in folder_of.tolist()],
        split_of=split_of,
        stats=stats.take(is_there),
        existing=existing,
        needed=sorted({label for path in trained for label in options.changed([_class_of(path)])}),
        has_splits=has_splits,
        faults=tuple(faults),
        notes=tuple(notes),
        hint=_only_folder(trained) or f"; {skipped.supported()}",
    )


def class_folders(folder: str, exclude: Collection[str] = ()) -> list[str]:
    """Return the folders in a folder by name, without hidden folders, excluded folders and runs."""
    return [
        normal_path(entry.path)
        for entry in visible_entries(folder)
        if entry.is_folder and composed(entry.name) not in exclude and not holds_runs(entry.path)
    ]


def _class_of(folder: str) -> str:
    return composed(basename(folder))


def _split_folders(root: str, exclude: Collection[str]) -> dict[str, str]:
    """Return the folder of each split, without excluded folders; {} if `root` only holds class folders."""
    folders = class_folders(root, exclude)
    named = [folder for folder in folders if basename(folder).lower() in SPLIT_NAMES]
    classes = [basename(path) for path in folders if path not in named and _num_loose(path)]
    split_named = [folder for folder in named if class_folders(folder)]
    if classes and split_named:
        splits = " and ".join(repr(basename(folder)) for folder in split_named)
        raise ValueError(
            f"{root} has the split folders {splits}, and {named_classes(classes)} next to them: "
            "move these into the split folders or elsewhere, or rename a class folder that has the name of a split"
        )
    if classes:
        return {}
    split_dirs: dict[str, str] = {}
    for folder in named:
        split = SPLIT_NAMES[basename(folder).lower()]
        if split in split_dirs:
            both = f"{basename(split_dirs[split])!r} and {basename(folder)!r}"
            raise ValueError(f"{root} holds both {both}: keep one of them")
        split_dirs[split] = folder
    return {split: split_dirs[split] for split in SPLITS if split in split_dirs}


def _num_loose(folder: str) -> int:
    """Return the number of images in `folder` itself, without subfolders."""
    try:
        visible = visible_entries(folder)
    except OSError:  # an unreadable folder, such as `lost+found` of a disk
        return 0
    return sum(is_image_file(entry.name) and not entry.is_folder for entry in visible)


def _missing_files(paths: PathList, stats: FileStats) -> Iterator[Fault]:
    for i in np.flatnonzero(~stats.is_regular).tolist():
        text = "it does not exist"
        if stats.sizes[i] >= 0:
            text = "it is not a file"
        elif os.path.islink(paths[i]):
            text = "the target of this link does not exist"
        yield Fault(paths[i], text, can_skip=True)


def _dangling_links(folder: str) -> Iterator[Fault]:
    """Yield a fault for each link to nothing next to class folders, which may have been one."""
    for entry in visible_entries(folder):
        if entry.is_link and kind_of(entry.path) == "link":
            yield Fault(entry.path, "the target of this link does not exist", can_skip=True)


def _invalid_names(folders: Sequence[tuple[str, str]]) -> Iterator[Fault]:
    """Yield a fault for each class whose name is not one line of text, as results and checkpoints store it."""
    for _, folder in folders:
        if why := why_name_is_invalid(_class_of(folder)):
            name = os.fsencode(basename(folder))
            yield Fault(os.path.dirname(folder), f"the class folder {name!r} {why}", "rename it")


def _unused(root: str, used: Collection[str], exclude: Collection[str]) -> Iterator[str]:
    """Yield a note for each folder of images next to the folders of the splits, such as a misspelt split."""
    for folder in class_folders(root, exclude):
        if folder not in used and any(find_images(folder, Skipped())):
            yield (
                f"{folder} has images that are not used: "
                "the folders of the splits are called train, val and test"
            )


def _no_classes(folder: str) -> str:
    """Return the message that a folder has no class folders."""
    num = _num_loose(folder)
    hint = f"; {counted(num, 'image lies', 'images lie')} loose in it" if num else ""
    return (
        f"{folder} has no class folders; put the images of each class in a folder of its name{hint}"
    )


def _only_folder(class_dirs: Sequence[str]) -> str:
    """Return the end of a message if there is one folder, and it has the classes or the splits; else ""."""
    if len(class_dirs) != 1 or _num_loose(class_dirs[0]):
        return ""
    names = [basename(folder) for folder in class_folders(class_dirs[0])]
    has_data = len(names) > 1 or any(name.lower() in SPLIT_NAMES for name in names)
    listed = ", ".join(map(repr, names[:3]))
    return f"; {class_dirs[0]} holds {listed}: pass that folder" if has_data else ""
