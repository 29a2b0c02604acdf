"""Apply corrections to images: change labels and exclude images. Splits, names and order of the images stay."""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from finetune.data.corrections import EXCLUDED, Corrections
from finetune.data.data_place import place_of
from finetune.data.samples import Samples
from finetune.data.targets import ClassIndex
from finetune.system.file_names import composed
from finetune.system.messages import WrongUsage, counted, did_you_mean, shown

SEVERAL_LABELS = "corrections of images with several labels are not supported"
_MOST_PAIRS = 10  # kinds of changed labels that a report lists


@dataclass(frozen=True)
class Classes:
    """The classes of a data set.

    Attributes:
        names: The classes in the order of their indices.
        excluded: Names of classes that are excluded. An image that is corrected to one is excluded.
        merged: New names of classes that are merged.
    """

    names: Sequence[str]
    excluded: Collection[str] = ()
    merged: Mapping[str, str] = field(default_factory=dict)


@dataclass
class SplitCorrections:
    """What the corrections change in a split.

    Attributes:
        pairs: Number of changed labels by (class before, class now).
        excluded: Number of excluded images.
        confirmed: Number of images whose label was confirmed.
        outdated: Number of corrections that are skipped, because the label has changed since.
    """

    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    excluded: int = 0
    confirmed: int = 0
    outdated: int = 0

    @property
    def changed(self) -> int:
        """Number of changed labels."""
        return self.pairs.total()

    def plain(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        pairs = [[*pair, num] for pair, num in self.pairs.most_common(_MOST_PAIRS)]
        return {
            "changed": self.changed,
            "excluded": self.excluded,
            "confirmed": self.confirmed,
            "outdated": self.outdated,
            "pairs": pairs,
        }


class CorrectedLabels(NamedTuple):
    """The labels of N images after corrections.

    Attributes:
        labels: Class index of each image, (N,).
        is_kept: Whether each image is kept, (N,) bool. The others are excluded.
        changes: What was changed.
        num_known: Number of images that have a correction.
    """

    labels: np.ndarray
    is_kept: np.ndarray
    changes: SplitCorrections
    num_known: int


@dataclass(frozen=True)
class AppliedCorrections:
    """What a file of corrections changes in a data set.

    Attributes:
        file: Path of the file.
        splits: The changes in each split to which corrections were applied.
        unknown: Number of corrections of images that are not in the data set.
        in_test: Number of corrections of test images, which were not applied.
    """

    file: str
    splits: Mapping[str, SplitCorrections]
    unknown: int = 0
    in_test: int = 0

    def line(self) -> str:
        """Return a text with the numbers."""
        splits = self.splits.values()
        changed = sum(split.changed for split in splits)
        excluded = sum(split.excluded for split in splits)
        outdated = sum(split.outdated for split in splits)
        text = f"corrections: {shown(self.file)}: {counted(changed, 'label')} changed, "
        text += f"{counted(excluded, 'image')} excluded"
        if "test" in self.splits and (
            num := self.splits["test"].changed + self.splits["test"].excluded
        ):
            text += f", {num:,} of them in test"
        if self.in_test:
            text += f"; {self.in_test:,} of test images not applied (--data.correct_test true)"
        if outdated:
            text += f"; {outdated:,} skipped, because the label has changed since"
        if self.unknown:
            text += f"; {self.unknown:,} of images that are not in the data set"
        return text

    def plain(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        return {
            "file": self.file,
            "splits": {name: split.plain() for name, split in self.splits.items()},
            "unknown": self.unknown,
            "in_test": self.in_test,
        }


def correct_splits(
    splits: Mapping[str, Samples],
    corrections: Corrections,
    root: Path,
    classes: Classes,
    correct_test: bool = False,
) -> tuple[dict[str, Samples], AppliedCorrections]:
    """Apply corrections to the images of a data set.

    Args:
        splits: The images by split.
        corrections: The corrections.
        root: Folder that the paths of the corrections are relative to.
        classes: The classes.
        correct_test: Whether to correct test images, too.

    Returns:
        The images, without splits that are empty now, and what was changed.

    Raises:
        ValueError: An image is corrected to an unknown class.
    """
    corrected = dict(splits)
    applied: dict[str, SplitCorrections] = {}
    num_known = 0
    in_test = 0
    for split, samples in splits.items():
        if not isinstance(samples.targets, ClassIndex):
            raise WrongUsage(f"{corrections.file}: {SEVERAL_LABELS}")
        names = relative_paths(samples.paths, root)
        result = correct_labels(names, samples.targets.labels, corrections, classes)
        changes = result.changes
        num_known += result.num_known
        if split == "test" and not correct_test:
            in_test = changes.changed + changes.excluded
            continue
        applied[split] = changes
        targets = ClassIndex(result.labels, samples.targets.num_classes)
        corrected[split] = replace(samples, targets=targets).take(np.flatnonzero(result.is_kept))
        if not result.is_kept.any():
            del corrected[split]
    unknown = len(corrections.by_path) - num_known
    return corrected, AppliedCorrections(corrections.file, applied, unknown, in_test)


def correct_labels(
    names: Iterable[str],
    labels: np.ndarray,
    corrections: Corrections,
    classes: Classes,
) -> CorrectedLabels:
    """Return the corrected labels of images.

    Args:
        names: Path of each image relative to the data set, N.
        labels: Class index of each image, (N,).
        corrections: The corrections.
        classes: The classes.

    Raises:
        ValueError: An image is corrected to an unknown class.
    """
    class_names = classes.names
    number = {composed(name): i for i, name in enumerate(class_names)}
    excluded = {EXCLUDED, *map(composed, classes.excluded)} - number.keys()
    merged = {composed(name): composed(new) for name, new in classes.merged.items()}
    changes = SplitCorrections()
    corrected = labels.copy()
    is_kept = np.ones(len(labels), bool)
    num_known = 0
    for i, name in enumerate(names):
        correction = corrections.find(name)
        if correction is None:
            continue
        num_known += 1
        was = composed(correction.was)
        now = composed(correction.now)
        now = merged.get(now, now)
        before = class_names[int(labels[i])]
        if merged.get(was, was) != composed(before):
            changes.outdated += 1
        elif now in excluded:
            is_kept[i] = False
            changes.excluded += 1
        elif now not in number:
            raise ValueError(
                f"{corrections.file}: {shown(name)} is corrected to {correction.now!r}, which is not a class of the "
                f"data set{did_you_mean(correction.now, class_names)}"
            )
        elif number[now] == labels[i]:
            changes.confirmed += 1
        else:
            corrected[i] = number[now]
            changes.pairs[before, class_names[number[now]]] += 1
    return CorrectedLabels(corrected, is_kept, changes, num_known)


def relative_paths(paths: Iterable[str], root: str | Path) -> Iterable[str]:
    """Return the paths relative to the folder of the data set, as in a file of corrections."""
    prefix = os.path.join(root, "")
    return (path.removeprefix(prefix) for path in paths)


def for_other_place(arguments: Mapping[str, Any], place: str | None) -> dict[str, Any]:
    """Return the arguments of a data module for a command that may name another data set.

    Corrections belong to the images of their data set: another one has none.

    Args:
        arguments: The arguments of an earlier data module.
        place: The folder or table that the command names; None for none.
    """
    before = place_of(arguments)
    if place is None or (before and os.path.realpath(place) == os.path.realpath(before)):
        return dict(arguments)
    return {
        name: value
        for name, value in arguments.items()
        if name not in ("corrections", "correct_test")
    }
