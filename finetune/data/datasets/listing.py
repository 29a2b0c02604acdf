"""What lies in a data set's folders, found as `folders.scan` finds it, but without an end at what is wrong there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finetune.data.datasets import misplaced
from finetune.data.datasets.folders import (
    class_folders,
    named_folders,
    read_split,
    split_folders,
)
from finetune.data.samples import PathList, Samples
from finetune.data.walk import Beside, num_loose
from finetune.system.messages import WrongUsage, counted


@dataclass(frozen=True)
class Listing:
    """All pictures of a data set, sorted by split, class and path.

    Attributes:
        root: The folder.
        paths: One path a picture.
        splits: The splits that have a folder; `all` where there are class folders alone.
        class_names: The names of all class folders of any split, sorted.
        split_of: Index into `splits` of each picture, (N,).
        class_of: Index into `class_names` of each, (N,).
        folders: Which split has a folder for which class, (splits, classes).
        beside: What else lies there.
    """

    root: Path
    paths: PathList
    splits: list[str]
    class_names: list[str]
    split_of: np.ndarray
    class_of: np.ndarray
    folders: np.ndarray
    beside: Beside

    def name(self, i: int) -> str:
        """Return what picture i is called beneath the root."""
        return self.paths[i].removeprefix(str(self.root)).lstrip("/")

    def counts(self) -> np.ndarray:
        """Return how many pictures each split has of each class, (splits, classes)."""
        num = len(self.splits), len(self.class_names)
        return np.bincount(
            self.split_of * num[1] + self.class_of, minlength=num[0] * num[1]
        ).reshape(num)


def list_pictures(root: str | Path) -> Listing:
    """Find the pictures of a data set; what `scan` would refuse, save a layout that has no meaning, is found too.

    Raises:
        WrongUsage: There is no such folder, it has no class folders, or it can't be told which they are.
        OSError: It can't be read.
    """
    root = Path(root)
    if not root.is_dir():
        raise WrongUsage(
            f"{str(root)!r} " + ("is a file, not a folder" if root.exists() else "does not exist")
        )
    try:
        split_dirs = split_folders(root) or {"all": root}
    except ValueError as error:
        raise WrongUsage(str(error)) from error
    splits = [split for split in ("train", "val", "test", "all") if split in split_dirs]
    inside = {split: named_folders(split_dirs[split]) for split in splits}
    class_names = sorted({name for folders in inside.values() for name in folders})
    if not class_names:
        hint = misplaced.hint_one_level_up(root, class_folders)
        num = num_loose(root)
        if num and not hint:
            hint = f"; {counted(num, 'picture lies', 'pictures lie')} loose in it"
        raise WrongUsage(
            f"{root} holds no class folders: put the pictures of each class in a folder of its name{hint}"
        )
    beside = Beside(skip=True)
    samples: dict[str, Samples] = {}
    for split in splits:
        class_dirs = [inside[split].get(name) for name in class_names]
        samples[split] = read_split(split_dirs[split], class_dirs, split, beside)
    folders = np.array([[name in inside[split] for name in class_names] for split in splits])
    return listing_of(root, samples, class_names, folders, beside)


def listing_of(
    root: Path,
    splits: Mapping[str, Samples],
    class_names: Sequence[str],
    folders: np.ndarray,
    beside: Beside,
) -> Listing:
    """Return the images of several splits as one listing; see `Listing` for the arguments."""
    return Listing(
        root=root,
        paths=PathList(path for samples in splits.values() for path in samples.paths),
        splits=list(splits),
        class_names=list(class_names),
        split_of=np.repeat(np.arange(len(splits)), [len(samples) for samples in splits.values()]),
        class_of=np.concatenate([samples.targets.labels for samples in splits.values()]),
        folders=folders,
        beside=beside,
    )
