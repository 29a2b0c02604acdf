"""The images of a place as its folders or the rows of its table name them, and the data set that they are.

`datasets.folders` and `tables.table_rows` make a `Listing`. All else is the same for both: which classes there are,
what is wrong with them, and the order of the images. So a table trains the weights of the folder that it lists.
"""

import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress

import numpy as np

from finetune.data.data_set import DataSet, empty_classes
from finetune.data.faults import Fault
from finetune.data.image_files import FileStats
from finetune.data.samples import PathList, Samples
from finetune.data.targets import ClassIndex, MultiHot, Targets
from finetune.settings.schema import LabelKind, LabelsOfTable
from finetune.system.file_names import composed
from finetune.system.messages import WrongUsage, did_you_mean, fault_of_names

SPLITS = ("all", "train", "val", "test")
_MOST_NAMED = 8  # classes that a message lists


@dataclass(frozen=True)
class ScanOptions:
    """How to read a data set. For a folder only `exclude` and `merge` have a meaning.

    Attributes:
        root: Folder that relative paths in a table are relative to; None for that of `folder_of`.
        columns: Column names by role, as `parse_columns` returns them.
        separator: The character between several labels; None finds it.
        labels: Whether an image has one label or several; `auto` decides by the table.
        exclude: Classes to exclude, by composed names.
        merge: New names of classes.
    """

    root: str | None = None
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    separator: str | None = None
    labels: LabelsOfTable = "auto"
    exclude: frozenset[str] = frozenset()
    merge: Mapping[str, str] = field(default_factory=dict)

    def changed(self, labels: Iterable[str]) -> tuple[str, ...]:
        """Return labels without excluded classes and with the new names of merged ones."""
        kept = (label for label in labels if label not in self.exclude)
        return tuple(dict.fromkeys(self.merge.get(label, label) for label in kept))

    def check_names(self, existing: Collection[str]) -> None:
        """Check that the classes to exclude or merge exist. A misspelt one would not be excluded or merged.

        Raises:
            WrongUsage: One does not.
        """
        for option, names in (("exclude", self.exclude), ("merge", self.merge)):
            for name in sorted(names):  # the same message for a set in any order
                if composed(name) not in existing:
                    hint = did_you_mean(name, sorted(existing))
                    raise WrongUsage(f"--data.{option}: there is no class {name!r}{hint}")


@dataclass(frozen=True)
class Listing:
    """The images of a place, N, sorted by name. Those that are faulty or of an excluded class are not among them.

    Attributes:
        place: The folder or the table, as the user has named it.
        folder: Folder that the names of the images are relative to.
        paths: The path of each image.
        labels: The labels of each image, composed, and after classes were excluded and merged.
        split_of: The index into `SPLITS` of each image, (N,).
        stats: Size and times of each file.
        existing: All classes that options may name, before classes were excluded and merged.
        needed: Labels that must have training images: the class folders, or the columns of 0 and 1.
        has_splits: Whether the place has splits.
        label_kind: Whether each image has exactly one class, or several labels or none.
        groups: The group of each image, (N,) uint64; None if there are none.
        group_names: The name of each group by its id.
        weights: The weight of each image, (N,) float64; None if there are none.
        where: Returns where an image has its label; None for its path.
        faults: What is wrong with folders, files and rows.
        notes: What a user should know.
        remark: How the labels were found.
        hint: What to do about a class without images; "" for nothing in particular.
    """

    place: str
    folder: str
    paths: PathList
    labels: Sequence[tuple[str, ...]]
    split_of: np.ndarray
    stats: FileStats
    existing: Collection[str]
    needed: Sequence[str]
    has_splits: bool
    label_kind: LabelKind = "single"
    groups: np.ndarray | None = None
    group_names: Mapping[int, str] = field(default_factory=dict)
    weights: np.ndarray | None = None
    where: Callable[[int], str] | None = None
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()
    remark: str = ""
    hint: str = ""


def data_set_of(listing: Listing, class_names: Sequence[str] | None) -> DataSet:
    """Return the images with their classes and splits, and what is wrong with them.

    Args:
        listing: The images.
        class_names: The classes in order, for example of a checkpoint; None for those of the training images.

    Raises:
        WrongUsage: The classes do not have different, valid names.
    """
    if class_names and (fault := fault_of_names([*map(composed, class_names)])):
        raise WrongUsage(f"data.class_names, for {listing.place}, has {fault}")
    is_trained = (listing.split_of <= SPLITS.index("train")).tolist()
    found = {*chain.from_iterable(listing.labels)}
    trained = {*chain.from_iterable(compress(listing.labels, is_trained))}
    known = class_names or sorted({*trained, *listing.needed})
    faults = [] if class_names else _class_faults(listing, trained)
    unknown = _unknown_labels(listing, known) if known else {}
    names = [*known, *sorted(unknown)] if class_names else sorted({*known, *found})
    splits = {
        name: _samples(listing, images, names)
        for k, name in enumerate(SPLITS)
        if len(images := np.flatnonzero(listing.split_of == k))
    }
    if class_names and not splits:
        faults.append(_without_images(listing, known))
    splits = splits or {"all": _samples(listing, np.arange(0), names)}
    return DataSet(
        class_names=names,
        splits=splits,
        place=listing.place,
        folder=listing.folder,
        label_kind=listing.label_kind,
        has_splits=listing.has_splits,
        faults=(*listing.faults, *faults, *unknown.values()),
        notes=(*listing.notes, *_lacking(splits, names, known, is_trained=not class_names)),
        remark=listing.remark,
    )


def _class_faults(listing: Listing, trained: Collection[str]) -> list[Fault]:
    """Return what is wrong with the classes of a data set for training."""
    classes = {*trained, *listing.needed}
    if not classes:
        splits = [repr(SPLITS[k]) for k in np.unique(listing.split_of).tolist()]
        what = (
            f"it has {' and '.join(splits)} but none of 'train'" if splits else "it has no images"
        )
        return [Fault(listing.place, what, "add the training images")]
    if len(classes) < 2:
        what = f"it has only the class {next(iter(classes))!r}"
        return [Fault(listing.place, what, f"a classifier needs at least two{listing.hint}")]
    empty = [label for label in listing.needed if label not in trained]
    return [_without_images(listing, empty)] if empty else []


def _without_images(listing: Listing, labels: Sequence[str]) -> Fault:
    text = f"it has no images to train on of {named_classes(labels)}{listing.hint}"
    return Fault(listing.place, text, f"add some, or {_exclusion_advice(labels)}")


def _unknown_labels(listing: Listing, class_names: Sequence[str]) -> dict[str, Fault]:
    """Return the labels that are not among the classes, with a fault of the first image of each."""
    known = set(map(composed, class_names))
    spelled = {name.lower(): name for name in class_names}
    faults: dict[str, Fault] = {}
    for i, labels in enumerate(listing.labels):
        for label in labels:
            if label in known or label in faults:
                continue
            where = listing.where(i) if listing.where else listing.paths[i]
            text = f"{label!r} is not in the training classes {', '.join(class_names)}"
            hint = f"correct it, or {_exclusion_advice([label])}"
            if same := spelled.get(label.lower()):
                hint = f"{label!r} is {same!r} there"
            faults[label] = Fault(where, text, hint)
    return faults


def _samples(listing: Listing, images: np.ndarray, class_names: Sequence[str]) -> Samples:
    """Return the images of a split by class, then by name; those with several labels by name."""
    index_of = {composed(name): k for k, name in enumerate(class_names)}
    labels = [listing.labels[i] for i in images.tolist()]
    classes = np.array([index_of[label] for of_image in labels for label in of_image], np.int64)
    targets: Targets
    if listing.label_kind == "single":
        by_class = np.argsort(classes, kind="stable")
        images = images[by_class]
        targets = ClassIndex(classes[by_class], len(class_names))
    else:
        has_label = np.zeros((len(images), len(class_names)), np.uint8)
        has_label[np.repeat(np.arange(len(images)), [*map(len, labels)]), classes] = 1
        targets = MultiHot(has_label)
    return Samples(
        listing.paths.take(images),
        targets,
        folder=listing.folder,
        stats=listing.stats.take(images),
        groups=None if listing.groups is None else listing.groups[images],
        group_names=listing.group_names,
        weights=None if listing.weights is None else listing.weights[images],
    )


def _lacking(
    splits: Mapping[str, Samples],
    names: Sequence[str],
    known: Sequence[str],
    is_trained: bool,
) -> Iterator[str]:
    """Yield a line for each split that has no images of some classes."""
    for split, samples in splits.items():
        empty = [name for name in empty_classes(samples.targets, names) if name in known]
        if empty and not (is_trained and split in ("all", "train")):  # there it is a fault
            images = "the images have none" if split == "all" else f"{split} has no images"
            yield f"{images} of {named_classes(empty)}: the results do not include it"


def _exclusion_advice(labels: Sequence[str]) -> str:
    value = labels[0]
    if len(labels) > 1:
        more = ", …" if len(labels) > _MOST_NAMED else ""
        value = f"[{', '.join(labels[:_MOST_NAMED])}{more}]"
    return f"skip {'it' if len(labels) == 1 else 'them'} with --data.exclude {shlex.quote(value)}"


def named_classes(names: Sequence[str]) -> str:
    """Return the names of classes in words, of many the first."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"the class{'es' if len(names) > 1 else ''} {', '.join(map(repr, names[:_MOST_NAMED]))}{more}"
