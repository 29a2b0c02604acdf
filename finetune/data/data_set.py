"""The images of a data set with their classes and splits, and what is wrong with them.

`datasets.scan` makes a `DataSet` from a folder or a table. `drawn_splits` and `corrections` have the functions from a
`DataSet` to a `DataSet`.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.faults import Fault
from finetune.data.samples import PathList, Samples
from finetune.data.splits import SPLIT_NAMES
from finetune.data.targets import ClassIndex, MultiHot, Targets
from finetune.system.messages import counted, shown

if TYPE_CHECKING:  # torch takes seconds to import
    from finetune.data.seen import SeenRecord
    from finetune.settings.schema import LabelKind


@dataclass(frozen=True)
class Changes:
    """What a file of corrections has changed in a data set.

    Attributes:
        file: Path of the file.
        splits: For each split that was corrected the numbers of images that were `changed`, `excluded` and
            `confirmed`, of corrections that are `outdated`, because the label has changed since, and the most frequent
            `pairs` of labels before and now, each with its number.
        unknown: Number of corrections of images that are not in the data set.
        in_test: Number of corrections of test images, which were not applied.
        has_several: Whether images have several labels.
    """

    file: str
    splits: Mapping[str, Mapping[str, Any]]
    unknown: int = 0
    in_test: int = 0
    has_several: bool = False

    def total(self, what: str) -> int:
        """Return a number over all splits."""
        return sum(split[what] for split in self.splits.values())

    def line(self) -> str:
        """Return a text with the numbers."""
        changed = self.total("changed")
        labels = (
            f"labels of {counted(changed, 'image')}"
            if self.has_several
            else counted(changed, "label")
        )
        text = f"corrections: {shown(self.file)}: {labels} changed, "
        text += f"{counted(self.total('excluded'), 'image')} excluded"
        of_test = self.splits.get("test", {"changed": 0, "excluded": 0})
        if num := of_test["changed"] + of_test["excluded"]:
            text += f", {num:,} of them in test"
        if self.in_test:
            text += f"; {self.in_test:,} of test images not applied (--data.correct_test true)"
        if outdated := self.total("outdated"):
            text += f"; {outdated:,} skipped, because the label has changed since"
        if self.unknown:
            text += f"; {self.unknown:,} of images that are not in the data set"
        return text

    def plain(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        names = ("file", "splits", "unknown", "in_test")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class DataSet:
    """The images of a data set: of each split sorted by class and name, with several labels by name only.

    Shapes: N images, S splits, K classes.

    Attributes:
        class_names: The classes, in the order of their indices, K.
        splits: The images of each split: `all` if the place has no splits and none were drawn, else some of `train`,
            `val`, `test` and `predict`.
        place: The folder or the table, as the user has named it.
        folder: Folder that the names of the images are relative to; "" if there is none.
        label_kind: Whether each image has exactly one class, or several labels or none.
        has_splits: Whether the place has splits, so that training does not draw all of them.
        faults: What is wrong. Files, folders and rows of faults with `can_skip` are not among the images.
        notes: What a user should know, such as the files that were skipped.
        remark: How the labels were found, for a log line; "" for class folders.
        corrections: What a file of corrections has changed; None without one.
        training_faults: Why these images can be evaluated, but not trained on.
        seen: The record of the training and validation images of a fit; None before it.
        fingerprint: A hash of the training and validation images and their targets; "" without training images.
    """

    class_names: list[str]
    splits: dict[str, Samples]
    place: str = ""
    folder: str = ""
    label_kind: "LabelKind" = "single"
    has_splits: bool = False
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()
    remark: str = ""
    corrections: Changes | None = None
    training_faults: tuple[str, ...] = ()
    seen: "SeenRecord | None" = None
    fingerprint: str = ""

    def __len__(self) -> int:
        return sum(map(len, self.splits.values()))

    @cached_property
    def is_labelled(self) -> bool:
        """Whether the images have labels."""
        return self.label_kind == "several" or bool((self.targets.labels >= 0).all())

    @cached_property
    def paths(self) -> PathList:
        """The path of each image, N."""
        return PathList.joined([samples.paths for samples in self.splits.values()])

    @cached_property
    def split_of(self) -> np.ndarray:
        """The index of the split of each image, (N,)."""
        return np.repeat(np.arange(len(self.splits)), [*map(len, self.splits.values())])

    @cached_property
    def targets(self) -> Targets:
        """The targets of all images, N."""
        labels = np.concatenate([samples.targets.labels for samples in self.splits.values()])
        if self.label_kind == "several":
            return MultiHot(labels)
        return ClassIndex(labels, len(self.class_names))

    @cached_property
    def groups(self) -> np.ndarray | None:
        """The group of each image, as in `Samples`, (N,); None if there are none."""
        groups = [samples.groups for samples in self.splits.values() if samples.groups is not None]
        return np.concatenate(groups) if groups else None

    @cached_property
    def _label_sets(self) -> tuple[list[str], np.ndarray]:
        if self.label_kind == "single":
            return self.class_names, self.targets.labels
        sets, set_of = np.unique(self.targets.labels, axis=0, return_inverse=True)
        names = [[self.class_names[k] for k in np.flatnonzero(row).tolist()] for row in sets]
        return [*map(label_set_name, names)], set_of.reshape(-1)

    @property
    def set_names(self) -> list[str]:
        """The classes; of several labels the sets of labels that occur. Copies of an image should be of one set."""
        return self._label_sets[0]

    @property
    def set_of(self) -> np.ndarray:
        """The index into `set_names` of each image, (N,)."""
        return self._label_sets[1]

    def labels_of(self, i: int) -> list[int]:
        """Return the indices of the labels of image i, ascending."""
        row = self.targets.labels[i]
        if self.label_kind == "several":
            return np.flatnonzero(row).tolist()
        return [int(row)] if row >= 0 else []

    def name(self, i: int) -> str:
        """Return the name of image i: its path below the folder of the data set."""
        return self.paths[i].removeprefix(os.path.join(self.folder, ""))

    def from_class(self, name: str) -> str:
        """Return the name of an image without the folder of its split, if it has one."""
        first, _, rest = name.partition("/")
        return rest if self.has_splits and first.lower() in SPLIT_NAMES else name

    def names(self) -> Iterator[str]:
        """Yield the name of each image."""
        return (name for samples in self.splits.values() for name in samples.names())

    def split_name(self, i: int) -> str:
        """Return the split of image i."""
        return list(self.splits)[int(self.split_of[i])]

    def counts(self) -> np.ndarray:
        """Return the number of images per split and class, (S, K). Of several labels an image counts for each."""
        return np.array([samples.targets.counts() for samples in self.splits.values()])

    def origin(self, split: str) -> str:
        """Return where the images of a split come from, in words; "" if it is a list of images to predict."""
        if self.splits[split].is_drawn:
            return "held out of training"
        if self.has_splits:
            return f"its {split} split"
        if split == "predict":
            return ""
        return "all" if len(self.splits) == 1 else "the remaining images"


def label_set_name(labels: Sequence[str]) -> str:
    """Return the labels of an image in words."""
    return " + ".join(labels) or "no label"


def empty_classes(targets: Targets, class_names: Sequence[str]) -> list[str]:
    """Return the names of the classes without images."""
    counts = targets.counts().tolist()
    return [name for name, num in zip(class_names, counts, strict=True) if num == 0]
