"""Labelled pictures in folders: which classes, which files, which split."""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from finetune.data.datasets import misplaced
from finetune.data.decode import IMAGE_SUFFIXES
from finetune.data.samples import PathList, Samples
from finetune.data.targets import ClassIndex
from finetune.data.walk import Beside, dangling, find_pictures, is_of_runs, num_loose
from finetune.system.file_names import class_name, composed, text_of
from finetune.system.messages import WrongUsage, did_you_mean, shown

log = logging.getLogger(__name__)

# In any case: `Train`, `VAL`.
_SPLIT_NAMES = {
    **dict.fromkeys(misplaced.TRAIN_NAMES, "train"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_SPLIT_NAMES |= dict.fromkeys(("val", "valid", "validation", "dev"), "val")
_MOST_NAMED = 8  # classes, in a message


def scan(
    root: str | Path,
    class_names: Sequence[str] | None = None,
    skip: bool = False,
    is_told: bool = True,
    exclude: Sequence[str] = (),
) -> tuple[list[str], dict[str, Samples]]:
    """Find the classes and files of a data set.

    `root` holds `train/CLASS/*` and perhaps `val` and `test` likewise, or other spellings of these; or class folders
    alone, which come back as the one split `all`. A class may be called `train`: what holds pictures, beside other
    folders that do, is a class, and what holds folders is a split. Classes are matched by name between the splits, in
    composed Unicode (NFC), however the file system writes it.

    Args:
        root: Folder of the data set.
        class_names: The classes, in order, where they are known already (from a checkpoint); else the folders of
            `train`, sorted.
        skip: Leave out folders that can't be read.
        is_told: Say what else was left out.
        exclude: Class folders to leave out, by name.

    Returns:
        Class names in the order of their indices, and the images of each split found, sorted by class and path.

    Raises:
        FileNotFoundError: There is no such folder.
        OSError: A folder that can't be read.
        ValueError: No class folders, no pictures, or a class that training does not know; where no `class_names` are
            given, an empty one in training; by name.
    """
    root = Path(root)
    if not root.is_dir():
        what = "is a file, not a folder" if root.exists() else "does not exist"
        raise FileNotFoundError(
            f"the data folder {str(root)!r} {what}; give another FOLDER (--data.root)"
        )
    inside = partial(class_folders, exclude=exclude)
    split_dirs = split_folders(root, exclude) or {"all": root}
    if "all" not in split_dirs and "train" not in split_dirs and not class_names:
        found = " and ".join(repr(folder.name) for folder in split_dirs.values())
        raise ValueError(
            f"{root} holds {found} but no 'train'; put the training pictures in {root}/train/CLASS"
        )
    first = split_dirs.get("train") or split_dirs.get("all")
    class_dirs = {split: named_folders(folder, exclude) for split, folder in split_dirs.items()}
    for folders in class_dirs.values():
        _check_composed(folders)
    is_known = class_names is not None
    if class_names is None:
        assert first is not None
        _check_excluded({root, *split_dirs.values()}, exclude)
        of_first = class_dirs["train" if "train" in class_dirs else "all"]
        class_names = list(of_first)
        _check_names(of_first)
        if not class_names:
            hint = misplaced.hint_one_level_up(first, inside)
            told = f"{first} holds no class folders; put the pictures of each class in a folder of its name"
            raise ValueError(f"{told}{hint}")
        if len(class_names) == 1:
            hint = misplaced.hint_one_level_down(first, list(of_first.values()), inside)
            raise ValueError(
                f"{first} holds only the class {class_names[0]!r}; a classifier needs at least two{hint}"
            )
        if is_told and (
            text := misplaced.warning_of_data_sets(first, list(of_first.values()), inside)
        ):
            log.warning("%s", text)
    else:
        _check_given_names(class_names)
    if twice := [name for name, num in Counter(map(composed, class_names)).items() if num > 1]:
        raise WrongUsage(f"data.class_names, for {root}, holds {_classes(twice)} more than once")
    beside = Beside(skip)
    splits: dict[str, Samples] = {}
    for split, folder in split_dirs.items():
        _check_known(folder, class_dirs[split], class_names, is_known)
        in_order = [class_dirs[split].get(composed(name)) for name in class_names]
        splits[split] = read_split(folder, in_order, split, beside)
        empty = empty_classes(splits[split], class_names)
        _check_filled(splits[split], empty, split, is_known)
        if empty and is_told:
            log.warning(
                "%s has no pictures of %s: its results say nothing about it",
                folder,
                _classes(empty),
            )
    if is_told:
        beside.tell(root)
        _tell_decomposed([folder for folders in class_dirs.values() for folder in folders.values()])
    return list(class_names), splits


def class_folders(folder: Path, exclude: Sequence[str] = ()) -> list[Path]:
    """Return the folders in a folder, sorted by name, without hidden, excluded ones and those of runs begun there."""
    excluded = set(map(composed, exclude))
    folders = (
        entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )
    return sorted(
        entry for entry in folders if class_name(entry) not in excluded and not is_of_runs(entry)
    )


def _check_excluded(folders: Iterable[Path], exclude: Sequence[str]) -> None:
    """Make sure that each excluded folder exists: otherwise a misspelt one would be trained on."""
    names = (
        {class_name(entry) for folder in folders for entry in folder.iterdir()}
        if exclude
        else set()
    )
    for name in exclude:
        if composed(name) not in names:
            raise WrongUsage(
                f"--data.exclude: there is no class folder {name!r}{did_you_mean(name, sorted(names))}"
            )


def named_folders(folder: Path, exclude: Sequence[str] = ()) -> dict[str, Path]:
    """Return the class folders in a folder by the names of their classes, sorted, without excluded ones.

    Of two folders whose names are equal in composed Unicode, one keeps its decomposed name: the caller must refuse
    them.
    """
    by_name: dict[str, Path] = {}
    for path in sorted(
        class_folders(folder, exclude), key=lambda path: text_of(path) != class_name(path)
    ):
        name = class_name(path)
        by_name[text_of(path) if name in by_name else name] = path
    return dict(sorted(by_name.items()))


def _check_names(class_dirs: Mapping[str, Path]) -> None:
    """Refuse classes whose names metrics, results and checkpoints could not carry as text on a line."""
    for name, folder in class_dirs.items():
        if reason := fault_of_name(name):
            raise ValueError(f"the class folder {os.fsencode(folder)!r} {reason}: rename it")


def _check_composed(class_dirs: Mapping[str, Path]) -> None:
    """Refuse two folders of one class, which differ only in Unicode composition."""
    for name, folder in class_dirs.items():
        if name != composed(name):
            both = " and ".join(
                repr(os.fsencode(path.name)) for path in (class_dirs[composed(name)], folder)
            )
            raise ValueError(
                f"{folder.parent} holds the class {composed(name)!r} in two folders, {both}, whose names differ in "
                "Unicode composition only: move the images into one of them"
            )


def _tell_decomposed(folders: Sequence[Path]) -> None:
    decomposed = [folder for folder in folders if text_of(folder) != class_name(folder)]
    if decomposed:
        names = ", ".join(sorted({repr(class_name(folder)) for folder in decomposed})[:_MOST_NAMED])
        log.info(
            "class folders with names in decomposed Unicode (NFD), as macOS writes them: %d. Their classes have the "
            "composed names (NFC): %s",
            len(decomposed),
            names,
        )


def _check_given_names(class_names: Sequence[str]) -> None:
    """Refuse names of a command line or checkpoint that no class folder can have: they become part of paths."""
    for name in class_names:
        if not name or fault_of_name(name) or Path(name).is_absolute() or ".." in Path(name).parts:
            raise WrongUsage(f"data.class_names: '{shown(name)}' is not the name of a class folder")


def fault_of_name(name: str) -> str:
    """Return why a class cannot have this name; "" if it can."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return "has a name that is not UTF-8"
    return "has a line break or control character in its name" if shown(name) != name else ""


def split_folders(root: Path, exclude: Sequence[str] = ()) -> dict[str, Path]:
    """Return the folder of each split, none where `root` holds class folders alone; some are left out."""
    folders = class_folders(root, exclude)
    named = [folder for folder in folders if folder.name.lower() in _SPLIT_NAMES]
    classes = (
        [folder.name for folder in folders if folder not in named and _is_class(folder)]
        if named
        else []
    )
    split_named = [folder for folder in named if class_folders(folder)]
    if classes and not split_named:
        return {}
    if classes:
        splits = " and ".join(repr(folder.name) for folder in split_named)
        raise ValueError(
            f"{root} holds {splits}, to be split folders, and {_classes(classes)} beside: move these into the split "
            "folders or elsewhere, or give a class that is called so another name"
        )
    found: dict[str, Path] = {}
    for folder in named:
        split = _SPLIT_NAMES[folder.name.lower()]
        if split in found:
            raise ValueError(
                f"{root} holds both {found[split].name!r} and {folder.name!r}: keep one of them"
            )
        found[split] = folder
    return found


def _is_class(folder: Path) -> bool:
    try:
        return num_loose(folder) > 0
    except OSError:  # one that can't be read, as the `lost+found` of a disk
        return False


def _check_known(
    folder: Path, class_dirs: Mapping[str, Path], class_names: Sequence[str], is_known: bool
) -> None:
    """Refuse class folders of a split that training does not know.

    Args:
        folder: The folder of the split.
        class_dirs: Its class folders by name.
        class_names: The classes of training.
        is_known: Whether these were given, by a checkpoint for example.
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
        hints.append(_leave_out(unknown))
    told = f"{folder} holds {_classes(unknown)} unknown to training, whose classes are {', '.join(class_names)}"
    raise ValueError("; ".join([told, *hints]))


def _check_filled(samples: Samples, empty: Sequence[str], split: str, is_known: bool) -> None:
    """Refuse a split without images, and empty classes of training, unless the classes were given."""
    must_be_filled = split in ("train", "all") and not is_known
    if empty and (must_be_filled or (split == "all" and not len(samples))):
        supported = " ".join(sorted(IMAGE_SUFFIXES))
        told = f"{samples.folder} has no pictures of {_classes(empty)}; supported are {supported}"
        raise ValueError(
            f"{told}; where {'they are' if len(empty) > 1 else 'it is'} no class, {_leave_out(empty)}"
        )


def empty_classes(samples: Samples, class_names: Sequence[str]) -> list[str]:
    """Return the names of the classes of which a split has no image."""
    counts = samples.targets.counts().tolist()
    return [name for name, num in zip(class_names, counts, strict=True) if num == 0]


def read_split(
    folder: Path, class_dirs: Sequence[Path | None], split: str, beside: Beside
) -> Samples:
    """Return the images of a split, sorted by class and path.

    Args:
        folder: The folder of the split.
        class_dirs: The folder of each class, K; None if there is none.
        split: Its name.
        beside: Gets what is skipped.

    Raises:
        OSError: A folder cannot be read, and `beside` does not skip it.
    """
    beside.unread += [f"{link}: a link to nothing" for link in dangling(folder)]
    if loose := num_loose(folder):
        beside.loose[str(folder)] = loose
    labels: list[int] = []
    paths: list[str] = []
    for label, class_dir in enumerate(class_dirs):
        found = list(find_pictures(class_dir, beside)) if class_dir else []
        paths += found
        labels += [label] * len(found)
    return Samples(
        PathList(paths),
        ClassIndex(np.array(labels, np.int64), len(class_dirs)),
        origin=f"its {folder.name} folder",
        folder=str(folder),
        tag=f"{split}/" if split in ("val", "test") else "",
    )


def _leave_out(names: Sequence[str]) -> str:
    """Return the advice to delete the folders of these classes or to exclude them."""
    if len(names) == 1:
        return f"delete the folder, or leave out with --data.exclude {names[0]}"
    more = ", …" if len(names) > _MOST_NAMED else ""
    return f"delete the folders, or leave out with --data.exclude '[{', '.join(names[:_MOST_NAMED])}{more}]'"


def _classes(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"the class{'es' if len(names) > 1 else ''} {', '.join(map(repr, names[:_MOST_NAMED]))}{more}"
