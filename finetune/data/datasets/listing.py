"""The list of all images of a data set. It is found as by `folders.scan`, but faults are not an error."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from finetune.data.corrected_samples import (
    AppliedCorrections,
    Classes,
    correct_targets,
    label_set_name,
    relative_paths,
)
from finetune.data.corrections import Corrections
from finetune.data.datasets.folders import (
    folder_fault,
    named_folders,
    read_split,
    split_folders,
)
from finetune.data.samples import PathList, Samples
from finetune.data.storage import normal_path, refresh
from finetune.data.tables.table_file import SUFFIXES
from finetune.data.targets import ClassIndex, MultiHot, Targets
from finetune.data.walk import SkippedFiles, num_loose
from finetune.system.messages import WrongUsage, counted


@dataclass(frozen=True)
class Listing:
    """All images of a data set, sorted by split, class and path.

    Attributes:
        root: Folder of the data set.
        paths: Path of each image, N.
        splits: Names of the splits that have a folder; `all` if there are only class folders.
        class_names: Names of the class folders of all splits, sorted.
        split_of: Index into `splits` of each image, (N,).
        class_of: Index into `class_names` of each image, (N,).
        folders: Whether a split has a folder for a class, (splits, classes).
        skipped: Files and folders that were skipped.
        table: The table that lists the images; None for class folders.
        label_names: If images have several labels, the names of the labels. Then a class is a set of labels.
        label_counts: The number of images per split and label, (splits, labels).
        label_sets: Whether each class, which is a set of labels, has each label, (classes, labels).
        groups: Group of each image, as in `Samples`, (N,); None if there are no groups.
    """

    root: str
    paths: PathList
    splits: list[str]
    class_names: list[str]
    split_of: np.ndarray
    class_of: np.ndarray
    folders: np.ndarray
    skipped: SkippedFiles
    table: str | None = None
    label_names: Sequence[str] = ()
    label_counts: np.ndarray | None = None
    label_sets: np.ndarray | None = None
    groups: np.ndarray | None = None

    @property
    def has_several_labels(self) -> bool:
        """Whether images have several labels."""
        return self.label_counts is not None

    @property
    def place(self) -> str:
        """The folder or the table that the user has named."""
        return self.root if self.table is None else self.table

    def name(self, i: int) -> str:
        """Return the path of image i relative to the root."""
        return self.paths[i].removeprefix(self.root).lstrip("/")

    def counts(self) -> np.ndarray:
        """Return the number of images per split and class, (splits, classes)."""
        num = len(self.splits), len(self.class_names)
        return np.bincount(
            self.split_of * num[1] + self.class_of, minlength=num[0] * num[1]
        ).reshape(num)


def list_images(root: str | os.PathLike[str]) -> Listing:
    """Find the images of a data set, also of one with faults that `scan` refuses. The layout must be unambiguous.

    Raises:
        WrongUsage: The folder does not exist, has no class folders, or has an ambiguous layout.
        OSError: The folder cannot be read.
    """
    root = normal_path(root)
    refresh(root)
    if fault := folder_fault(root):
        raise WrongUsage(
            f"{root!r} {fault}: pass a folder of images, or a table of them ({' '.join(SUFFIXES)})"
        )
    try:
        split_dirs = split_folders(root) or {"all": root}
        splits = [split for split in ("train", "val", "test", "all") if split in split_dirs]
        inside = {split: named_folders(split_dirs[split]) for split in splits}
    except ValueError as error:
        raise WrongUsage(str(error)) from error
    class_names = sorted({name for folders in inside.values() for name in folders})
    if not class_names:
        num = num_loose(root)
        hint = f"; {counted(num, 'image lies', 'images lie')} loose in it" if num else ""
        raise WrongUsage(
            f"{root} has no class folders: put the images of each class in a folder of its name{hint}"
        )
    skipped = SkippedFiles(skip_unreadable=True)
    samples: dict[str, Samples] = {}
    for split in splits:
        class_dirs = [
            [inside[split][name]] if name in inside[split] else [] for name in class_names
        ]
        samples[split] = read_split(split_dirs[split], class_dirs, split, skipped)
    folders = np.array([[name in inside[split] for name in class_names] for split in splits])
    return listing_of(root, samples, class_names, folders, skipped)


def _class_of(targets: Targets) -> np.ndarray:
    """Return the class of each image, (N,); of several labels the first one, and K for none."""
    if isinstance(targets, ClassIndex):
        return targets.labels
    has_label = targets.labels.astype(bool)
    return np.where(has_label.any(axis=1), has_label.argmax(axis=1), targets.num_classes)


def with_label_sets(listing: Listing, splits: Mapping[str, Samples]) -> Listing:
    """Return a listing of images with several labels, whose classes are the sets of labels that occur.

    So two copies of an image are in one class if they have the same labels.

    Args:
        listing: The images of `splits`, with the names of the labels as class names.
        splits: The images by split. Their targets are `MultiHot`.
    """
    has_label = np.concatenate([samples.targets.labels for samples in splits.values()])
    return _with_label_sets(replace(listing, label_names=listing.class_names), has_label)


def _with_label_sets(listing: Listing, has_label: np.ndarray) -> Listing:
    """Return the listing with the labels (N, K), 0 or 1, of its images."""
    names = listing.label_names
    sets, class_of = np.unique(has_label, axis=0, return_inverse=True)
    set_names = [label_set_name([names[k] for k in np.flatnonzero(row).tolist()]) for row in sets]
    counts = [
        has_label[listing.split_of == k].sum(axis=0, dtype=np.int64)
        for k in range(len(listing.splits))
    ]
    return replace(
        listing,
        class_names=set_names,
        class_of=class_of.reshape(-1),
        folders=np.ones((len(listing.splits), len(set_names)), bool),
        label_counts=np.array(counts),
        label_sets=sets,
    )


def correct_listing(
    listing: Listing, corrections: Corrections
) -> tuple[Listing, AppliedCorrections]:
    """Return the images with corrected labels, without excluded ones, and what was changed.

    Raises:
        ValueError: An image is corrected to an unknown class.
    """
    targets: Targets = ClassIndex(listing.class_of, len(listing.class_names))
    names = listing.class_names
    if listing.label_sets is not None:
        targets = MultiHot(listing.label_sets[listing.class_of])
        names = list(listing.label_names)
    result = correct_targets(
        relative_paths(listing.paths, listing.root),
        targets,
        corrections,
        Classes(names),
    )
    rows = np.flatnonzero(result.is_kept)
    labels = result.targets.labels[rows]
    corrected = replace(
        listing,
        paths=PathList(listing.paths[i] for i in rows.tolist()),
        split_of=listing.split_of[rows],
        groups=None if listing.groups is None else listing.groups[rows],
    )
    if listing.label_sets is None:
        corrected = replace(corrected, class_of=labels)
    else:
        corrected = _with_label_sets(corrected, labels)
    unknown = len(corrections.by_path) - result.num_known
    return corrected, AppliedCorrections(corrections.file, {"all": result.changes}, unknown)


def listing_of(
    root: str,
    splits: Mapping[str, Samples],
    class_names: Sequence[str],
    folders: np.ndarray,
    skipped: SkippedFiles,
) -> Listing:
    """Return the images of several splits as one listing; see `Listing` for the arguments."""
    groups = [samples.groups for samples in splits.values() if samples.groups is not None]
    return Listing(
        root=root,
        paths=PathList(path for samples in splits.values() for path in samples.paths),
        splits=list(splits),
        class_names=list(class_names),
        split_of=np.repeat(np.arange(len(splits)), [len(samples) for samples in splits.values()]),
        class_of=np.concatenate([_class_of(samples.targets) for samples in splits.values()]),
        folders=folders,
        skipped=skipped,
        groups=np.concatenate(groups) if groups else None,
    )
