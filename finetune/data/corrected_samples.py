"""Apply corrections to a data set: change labels and exclude images. Splits, names and order of the images stay."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from finetune.data.corrections import EXCLUDED, Changes, Correction, split_labels
from finetune.data.data_place import place_of
from finetune.data.data_set import DataSet, label_set_name
from finetune.data.image_files import is_same_place
from finetune.data.samples import Samples
from finetune.data.targets import ClassIndex, MultiHot, Targets
from finetune.system.file_names import composed
from finetune.system.messages import did_you_mean, shown

_MOST_PAIRS = 10  # kinds of changed labels that a report lists


def correct(
    data: DataSet,
    file: str,
    decisions: Mapping[str, Correction],
    exclude: Collection[str] = (),
    merge: Mapping[str, str] | None = None,
    with_test: bool = False,
) -> DataSet:
    """Return a data set with corrected labels, without the images and splits that are excluded now.

    Args:
        data: The data set.
        file: Path of the file of corrections.
        decisions: The decisions in it, as `read_corrections` returns them.
        exclude: Classes that the data set excludes. An image that is corrected to one is excluded.
        merge: New names of classes that the data set merges.
        with_test: Whether to correct test images, too.

    Raises:
        ValueError: An image is corrected to an unknown class.
    """
    labels = _Labels(data, exclude, merge or {})
    splits = dict(data.splits)
    changes: dict[str, dict[str, Any]] = {}
    num_known = 0
    in_test = 0
    for split, samples in data.splits.items():
        targets, is_kept, of_split, num = _correct_split(samples, file, decisions, labels)
        num_known += num
        if split == "test" and not with_test:
            in_test = of_split["changed"] + of_split["excluded"]
            continue
        changes[split] = of_split
        splits[split] = replace(samples, targets=targets)
        if not is_kept.all():
            splits[split] = splits[split].take(np.flatnonzero(is_kept))
        if not is_kept.any():
            del splits[split]
    applied = Changes(file, changes, len(decisions) - num_known, in_test, labels.has_several)
    return replace(data, splits=splits, corrections=applied)


def _correct_split(
    samples: Samples, file: str, decisions: Mapping[str, Correction], labels: "_Labels"
) -> tuple[Targets, np.ndarray, dict[str, Any], int]:
    """Return the targets of a split, which images are kept, (N,) bool, what was changed, and how many are known."""
    corrected = samples.targets.labels.copy()
    is_kept = np.ones(len(samples), bool)
    num: Counter[str] = Counter()
    pairs: Counter[tuple[str, str]] = Counter()
    for i, name in enumerate(samples.names()):
        correction = decisions.get(composed(name))
        if correction is None:
            continue
        num["known"] += 1
        before = labels.names_at(corrected[i])
        now = labels.parse(correction.now)
        if labels.parse(correction.was) != {composed(label) for label in before}:
            num["outdated"] += 1
        elif labels.is_excluded(correction.now, now):
            num["excluded"] += 1
            is_kept[i] = False
        else:
            corrected[i] = labels.row(now, f"{file}: {shown(name)}")
            after = labels.names_at(corrected[i])
            num["confirmed" if after == before else "changed"] += 1
            if after != before:
                pairs[label_set_name(before), label_set_name(after)] += 1
    targets: Targets = MultiHot(corrected)
    if isinstance(samples.targets, ClassIndex):
        targets = ClassIndex(corrected, samples.targets.num_classes)
    changes = {name: num[name] for name in ("changed", "excluded", "confirmed", "outdated")}
    most = [[*pair, times] for pair, times in pairs.most_common(_MOST_PAIRS)]
    return targets, is_kept, {**changes, "pairs": most}, num["known"]


class _Labels:
    """Reads the labels in a file of corrections as those of a data set.

    Args:
        data: The data set.
        exclude: Classes that it excludes.
        merge: New names of classes that it merges.
    """

    def __init__(self, data: DataSet, exclude: Collection[str], merge: Mapping[str, str]) -> None:
        self.names = data.class_names
        self.has_several = data.label_kind == "several"
        self._number = {composed(name): k for k, name in enumerate(self.names)}
        self._merged = {composed(name): composed(new) for name, new in merge.items()}
        self._excluded = {*map(composed, exclude)} - self._number.keys()

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
        if EXCLUDED not in self._number and composed(text) == EXCLUDED:
            return True
        return not self.has_several and not parsed.isdisjoint(self._excluded)

    def names_at(self, row: np.ndarray) -> list[str]:
        """Return the classes of an image: of a class index, or of (K,) 0 or 1."""
        if not self.has_several:
            return [self.names[int(row)]]
        return [self.names[k] for k in np.flatnonzero(row).tolist()]

    def row(self, names: set[str], where: str) -> Any:
        """Return the class index of an image, or (K,) 0 or 1.

        Raises:
            ValueError: A class is unknown.
        """
        if unknown := sorted(names - self._number.keys()):
            hint = did_you_mean(unknown[0], self.names)
            raise ValueError(
                f"{where} is corrected to {unknown[0]!r}, which is not a class of the data set{hint}"
            )
        numbers = [self._number[name] for name in names]
        if not self.has_several:
            return numbers[0]
        has_label = np.zeros(len(self.names), np.uint8)
        has_label[numbers] = 1
        return has_label


def for_other_place(arguments: Mapping[str, Any], place: str | None) -> dict[str, Any]:
    """Return the arguments of a data module for a command that may name another data set.

    Corrections, groups and folds belong to the images of their data set: another one has none. A regular expression of
    an untrusted checkpoint could take for ever.

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
        if name not in ("corrections", "correct_test", "group_by", "num_folds", "fold")
    }
