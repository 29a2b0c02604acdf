"""Apply corrections to images: change labels and exclude images. Splits, names and order of the images stay."""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from finetune.data.corrections import EXCLUDED, Corrections, split_labels
from finetune.data.data_place import place_of
from finetune.data.samples import Samples
from finetune.data.storage import is_same_place
from finetune.data.targets import ClassIndex, MultiHot, Targets
from finetune.system.file_names import composed
from finetune.system.messages import counted, did_you_mean, shown

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
        pairs: Number of images with changed labels by (class before, class now).
        excluded: Number of excluded images.
        confirmed: Number of images whose label was confirmed.
        outdated: Number of corrections that are skipped, because the label has changed since.
        has_several: Whether images have several labels.
    """

    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    excluded: int = 0
    confirmed: int = 0
    outdated: int = 0
    has_several: bool = False

    @property
    def changed(self) -> int:
        """Number of images with changed labels."""
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


class CorrectedTargets(NamedTuple):
    """The targets of N images after corrections.

    Attributes:
        targets: The targets, N.
        is_kept: Whether each image is kept, (N,) bool. The others are excluded.
        changes: What was changed.
        num_known: Number of images that have a correction.
    """

    targets: Targets
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
        labels = counted(changed, "label")
        if any(split.has_several for split in splits):
            labels = f"labels of {counted(changed, 'image')}"
        text = f"corrections: {shown(self.file)}: {labels} changed, "
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
    root: str,
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
        names = relative_paths(samples.paths, root)
        result = correct_targets(names, samples.targets, corrections, classes)
        changes = result.changes
        num_known += result.num_known
        if split == "test" and not correct_test:
            in_test = changes.changed + changes.excluded
            continue
        applied[split] = changes
        rows = np.flatnonzero(result.is_kept)
        corrected[split] = replace(samples, targets=result.targets).take(rows)
        if not result.is_kept.any():
            del corrected[split]
    unknown = len(corrections.by_path) - num_known
    return corrected, AppliedCorrections(corrections.file, applied, unknown, in_test)


def correct_targets(
    names: Iterable[str],
    targets: Targets,
    corrections: Corrections,
    classes: Classes,
) -> CorrectedTargets:
    """Return the corrected targets of images.

    Args:
        names: Path of each image relative to the data set, N.
        targets: The targets of the images, N.
        corrections: The corrections.
        classes: The classes.

    Raises:
        ValueError: An image is corrected to an unknown class.
    """
    known = _KnownClasses(classes, isinstance(targets, MultiHot))
    changes = SplitCorrections(has_several=known.has_several)
    corrected = targets.labels.copy()
    is_kept = np.ones(len(corrected), bool)
    num_known = 0
    for i, name in enumerate(names):
        correction = corrections.find(name)
        if correction is None:
            continue
        num_known += 1
        before = known.classes_at(corrected[i])
        if known.parse(correction.was) != {composed(label) for label in before}:
            changes.outdated += 1
            continue
        now = known.parse(correction.now)
        if known.is_excluded(correction.now, now):
            is_kept[i] = False
            changes.excluded += 1
            continue
        unknown = sorted(now - known.number.keys())
        if unknown:
            raise ValueError(
                f"{corrections.file}: {shown(name)} is corrected to {unknown[0]!r}, which is not a class of the "
                f"data set{did_you_mean(unknown[0], classes.names)}"
            )
        corrected[i] = known.row(now)
        after = known.classes_at(corrected[i])
        if after == before:
            changes.confirmed += 1
        else:
            changes.pairs[label_set_name(before), label_set_name(after)] += 1
    result: Targets = MultiHot(corrected)
    if isinstance(targets, ClassIndex):
        result = ClassIndex(corrected, targets.num_classes)
    return CorrectedTargets(result, is_kept, changes, num_known)


class _KnownClasses:
    """Reads the classes in a file of corrections as those of the data set.

    Args:
        classes: The classes.
        has_several: Whether images have several labels.

    Attributes:
        number: The index of each class by its name in composed Unicode.
    """

    def __init__(self, classes: Classes, has_several: bool) -> None:
        self.names = classes.names
        self.has_several = has_several
        self.number = {composed(name): k for k, name in enumerate(classes.names)}
        self._merged = {composed(name): composed(new) for name, new in classes.merged.items()}
        self._excluded = {*map(composed, classes.excluded)} - self.number.keys()

    def parse(self, text: str) -> set[str]:
        """Return the classes in a text after the merge, also unknown ones.

        Of several labels those that are excluded are removed.
        """
        if not self.has_several:
            name = composed(text)
            return {self._merged.get(name, name)}
        labels = (self._merged.get(label, label) for label in split_labels(text))
        return {label for label in labels if label not in self._excluded}

    def is_excluded(self, text: str, parsed: set[str]) -> bool:
        """Return whether a decision excludes the image."""
        if EXCLUDED not in self.number and composed(text) == EXCLUDED:
            return True
        return not self.has_several and not parsed.isdisjoint(self._excluded)

    def classes_at(self, row: np.ndarray) -> list[str]:
        """Return the classes of an image: of a class index, or of (K,) 0 or 1."""
        if not self.has_several:
            return [self.names[int(row)]]
        return [self.names[k] for k in np.flatnonzero(row).tolist()]

    def row(self, names: set[str]) -> Any:
        """Return the class index of an image, or (K,) 0 or 1."""
        numbers = [self.number[name] for name in names]
        if not self.has_several:
            return numbers[0]
        has_label = np.zeros(len(self.names), np.uint8)
        has_label[numbers] = 1
        return has_label


def label_set_name(labels: Sequence[str]) -> str:
    """Return the labels of an image in words."""
    return " + ".join(labels) or "no label"


def relative_paths(paths: Iterable[str], root: str) -> Iterable[str]:
    """Return the paths relative to the folder of the data set, as in a file of corrections."""
    prefix = os.path.join(root, "")
    return (path.removeprefix(prefix) for path in paths)


def for_other_place(arguments: Mapping[str, Any], place: str | None) -> dict[str, Any]:
    """Return the arguments of a data module for a command that may name another data set.

    Corrections and groups belong to the images of their data set: another one has none. A regular expression of an
    untrusted checkpoint could take for ever.

    Args:
        arguments: The arguments of an earlier data module.
        place: The folder or table that the command names; None for none.
    """
    before = place_of(arguments)
    if place is None or (before and is_same_place(place, before)):
        return dict(arguments)
    return {
        name: value
        for name, value in arguments.items()
        if name not in ("corrections", "correct_test", "group_by")
    }
