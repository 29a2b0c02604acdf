"""What lies in a data set's folders, found as `folders.scan` finds it, but without an end at what is wrong there."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finetune.data.datasets import misplaced
from finetune.data.datasets.folders import class_folders, named_folders, split_folders
from finetune.data.samples import PathList
from finetune.data.walk import Beside, dangling, find_pictures, num_loose
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
    splits: list[str] = [split for split in ("train", "val", "test", "all") if split in split_dirs]
    beside = Beside(skip=True)
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
    split_of: list[int] = []
    class_of: list[int] = []

    def found_paths() -> Iterator[str]:
        for s, split in enumerate(splits):
            beside.unread.extend(
                f"{link}: a link to nothing" for link in dangling(split_dirs[split])
            )
            if loose := num_loose(split_dirs[split]):
                beside.loose[str(split_dirs[split])] = loose
            for c, name in enumerate(class_names):
                for path in (
                    find_pictures(inside[split][name], beside) if name in inside[split] else ()
                ):
                    split_of.append(s)
                    class_of.append(c)
                    yield path

    paths = PathList(found_paths())
    folders = np.array([[name in inside[split] for name in class_names] for split in splits])
    indices = np.array(split_of, np.int64), np.array(class_of, np.int64)
    return Listing(root, paths, splits, class_names, *indices, folders, beside)
