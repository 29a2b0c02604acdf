"""Apply corrections to a data set: change labels and exclude images. Splits, names and order of the images stay."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from finetune.data.corrections import EXCLUDED, Changes, Correction, split_labels
from finetune.data.data_place import place_of
from finetune.data.data_set import DataSet, label_set_name
from finetune.data.image_files import is_same_place
from finetune.data.listing import ScanOptions
from finetune.data.samples import Samples
from finetune.system.file_names import composed
from finetune.system.messages import did_you_mean, shown

_MOST_PAIRS = 10  # kinds of changed labels that a report lists
_AS_FOUND = ScanOptions()


def correct(
    data: DataSet,
    file: str,
    decisions: Mapping[str, Correction],
    options: ScanOptions = _AS_FOUND,
    with_test: bool = False,
) -> DataSet:
    """Return a data set with corrected labels, without the images and splits that are excluded now.

    Args:
        data: The data set.
        file: Path of the file of corrections.
        decisions: The decisions in it, as `read_corrections` returns them.
        options: How the data set was read. An image that is corrected to an excluded class is excluded.
        with_test: Whether to correct test images, too.

    Raises:
        ValueError: An image is corrected to an unknown class, or all images are excluded.
    """
    splits = dict(data.splits)
    changes: dict[str, dict[str, Any]] = {}
    num_known = 0
    in_test = 0
    for split, samples in data.splits.items():
        corrected, of_split = _correct_split(data, samples, file, decisions, options)
        num_known += of_split.pop("known")
        if split == "test" and not with_test:
            in_test = of_split["changed"] + of_split["excluded"]
            continue
        changes[split] = of_split
        splits[split] = corrected
        if not len(corrected):
            del splits[split]
    if not splits:
        raise ValueError(f"{file}: no image is left, because all are excluded")
    unknown = len(decisions) - num_known
    applied = Changes(file, changes, unknown, in_test, data.label_kind == "several")
    return replace(data, splits=splits, corrections=applied)


def _correct_split(
    data: DataSet,
    samples: Samples,
    file: str,
    decisions: Mapping[str, Correction],
    options: ScanOptions,
) -> tuple[Samples, dict[str, Any]]:
    """Return the corrected images of a split, and what was changed; `known` are those with a decision."""
    number_of = {composed(name): k for k, name in enumerate(data.class_names)}
    is_single = data.label_kind == "single"

    def parse(text: str) -> set[str]:
        return set(options.changed([composed(text)] if is_single else split_labels(text)))

    labels = samples.targets.labels.copy()
    is_kept = np.ones(len(samples), bool)
    num: Counter[str] = Counter()
    pairs: Counter[tuple[str, str]] = Counter()
    for i, name in enumerate(samples.names()):
        correction = decisions.get(composed(name))
        if correction is None:
            continue
        num["known"] += 1
        before = [int(labels[i])] if is_single else np.flatnonzero(labels[i]).tolist()
        now = parse(correction.now)
        is_excluded = composed(correction.now) == EXCLUDED and EXCLUDED not in number_of
        if {number_of.get(label, -1) for label in parse(correction.was)} != set(before):
            num["outdated"] += 1
        elif is_excluded or (is_single and not now):
            num["excluded"] += 1
            is_kept[i] = False
        else:
            if unknown := sorted(now - number_of.keys()):
                hint = did_you_mean(unknown[0], data.class_names)
                raise ValueError(
                    f"{file}: {shown(name)} is corrected to {unknown[0]!r}, which is not a class of the data set{hint}"
                )
            after = sorted(number_of[label] for label in now)
            num["confirmed" if after == before else "changed"] += 1
            if after != before:
                both = [label_set_name([data.class_names[k] for k in of]) for of in (before, after)]
                pairs[both[0], both[1]] += 1
                labels[i] = after[0] if is_single else np.isin(np.arange(len(number_of)), after)
    changes = {name: num[name] for name in ("changed", "excluded", "confirmed", "outdated")}
    most = [[*pair, times] for pair, times in pairs.most_common(_MOST_PAIRS)]
    corrected = replace(samples, targets=replace(samples.targets, labels=labels))
    if not is_kept.all():
        corrected = corrected.take(np.flatnonzero(is_kept))
    return corrected, {**changes, "pairs": most, "known": num["known"]}


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
