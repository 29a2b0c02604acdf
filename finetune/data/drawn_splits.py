"""Draw the splits that a place does not have, and put images into groups that share one, such as those of a patient."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from finetune.data.data_set import DataSet, empty_classes
from finetune.data.image_files import concatenate_stats
from finetune.data.samples import PathList, Samples
from finetune.data.splits import (
    fold_parts,
    group_ids,
    hashes,
    stratified,
    units_of,
    with_each_label,
)
from finetune.data.targets import ClassIndex, MultiHot
from finetune.settings.schema import DataSettings
from finetune.system.messages import WrongUsage, counted, shown

BY_FOLDER = "folder"  # a value of `--data.group_by`; others are regular expressions
_FAR_OFF = 1 / 3  # of the requested fraction


def check_group_by(group_by: str | None) -> None:
    """Check `--data.group_by`.

    Raises:
        WrongUsage: It is neither `folder` nor a regular expression.
    """
    if group_by == "":
        raise WrongUsage(f"--data.group_by is empty: pass {BY_FOLDER} or a regular expression")
    try:
        re.compile(group_by or BY_FOLDER)
    except (re.error, RecursionError, OverflowError) as error:
        raise WrongUsage(
            f"--data.group_by {group_by!r} is neither {BY_FOLDER} nor a regular expression: {error}"
        ) from error


def put_into_groups(data: DataSet, group_by: str | None) -> DataSet:
    """Return a data set whose images have their groups.

    Args:
        data: The data set.
        group_by: `folder` for the folder beneath the class, or a regular expression that is searched for in the path
            from the class on (`CLASS/FOLDER/FILE`): its first capture group, or else its match, is the group. An image
            without a match, or without a folder, is a group of its own.

    Raises:
        WrongUsage: The images have groups already.
    """
    if group_by is None:
        return data
    if data.groups is not None:
        raise WrongUsage("the table has a column of groups: remove --data.group_by")
    pattern = re.compile(group_by)

    first = 0 if "predict" in data.splits else 1  # these have no folder of a class

    def group_of(name: str) -> str:
        path = data.from_class(name)
        if group_by == BY_FOLDER:
            return "/".join(path.split("/")[first:-1]) or name
        match = pattern.search(path)
        return (match and match[1 if pattern.groups else 0]) or name

    names = {split: [*map(group_of, part.names())] for split, part in data.splits.items()}
    return with_groups(data, names)


def with_groups(data: DataSet, names: Mapping[str, Sequence[str]]) -> DataSet:
    """Return a data set whose images have groups, from the name of the group of each image by split."""
    ids = {split: group_ids(of_images) for split, of_images in names.items()}
    name_of = {
        i: name
        for split in names
        for i, name in zip(ids[split].tolist(), names[split], strict=True)
    }
    splits = {
        split: replace(samples, groups=ids[split], group_names=name_of)
        for split, samples in data.splits.items()
    }
    return replace(data, splits=splits)


def draw_splits(data: DataSet, settings: DataSettings) -> DataSet:
    """Return the data set with a validation and a test split, and without `all`.

    Images without splits are drawn for both. Without a validation split its images are drawn from those of training.
    Folds are drawn from all images without a split, or from those of training.

    Args:
        data: The data set. Without training images it is returned as it is.
        settings: The fractions, the seed and the fold.
    """
    everything = data.splits.get("all", data.splits.get("train"))
    if everything is None:
        return data
    faults = data.training_faults
    val_fraction = 0.0 if "val" in data.splits else settings.val_fraction
    if settings.fold is not None and settings.num_folds is not None:
        ids = hashes([*data.class_names, ""], settings.split_seed).view(np.int64)
        strata = ids[everything.targets.strata()]
        units = units_of(everything.names(), strata, settings.split_seed, everything.groups)
        folds = [
            fold_parts(units, fold, settings.num_folds, val_fraction)
            for fold in range(1, settings.num_folds + 1)
        ]
        faults += _fold_faults(everything, folds, data.class_names)
        parts = folds[settings.fold - 1]
    else:
        test_fraction = settings.test_fraction if "all" in data.splits else 0.0
        parts = _parts(everything, (val_fraction, test_fraction), settings.split_seed)
    splits = {name: part for name, part in data.splits.items() if name != "all"}
    splits["train"] = everything.take(parts[0])
    for name, rows in zip(("val", "test"), parts[1:], strict=True):
        if len(rows):
            splits[name] = replace(everything.take(rows), is_drawn=True)
    return replace(data, splits=splits, training_faults=faults)


def _parts(everything: Samples, fractions: Sequence[float], seed: int) -> list[np.ndarray]:
    """Return the images of training, of validation, and of test."""
    strata = everything.targets.strata()
    parts = stratified(everything.names(), strata, fractions, seed, everything.groups)
    if isinstance(everything.targets, MultiHot):
        groups = np.arange(len(everything)) if everything.groups is None else everything.groups
        parts = with_each_label(everything.targets.labels, groups, parts)
    return parts


def _fold_faults(
    everything: Samples, folds: Sequence[Sequence[np.ndarray]], class_names: Sequence[str]
) -> tuple[str, ...]:
    """Return what is wrong with the first faulty fold of a cross-validation, before any fold trains; () for nothing."""
    for fold, (train, _, test) in enumerate(folds, 1):
        name = f"fold {fold} of {len(folds)}"
        if not len(test):
            return (f"{name} would test no image: take fewer folds",)
        if lacking := empty_classes(everything.targets.take(train), class_names):
            return (
                f"{name} would have no images to train on of {', '.join(lacking)}: "
                "add some, skip them with --data.exclude, or take another number of folds",
            )
    return ()


def joined(parts: Sequence[Samples]) -> Samples:
    """Return the images of splits that were drawn as one split that was not, by class and path."""
    first = parts[0]
    paths = PathList.joined([part.paths for part in parts])
    labels = np.concatenate([part.targets.labels for part in parts])
    groups = [part.groups for part in parts if part.groups is not None]
    images = replace(
        first,
        paths=paths,
        targets=replace(first.targets, labels=labels),
        cached=None,
        facts=None,
        stats=concatenate_stats([part.load_stats() for part in parts]),
        groups=np.concatenate(groups) if groups else None,
        weights=None,
        is_drawn=False,
    )
    class_of = labels if isinstance(first.targets, ClassIndex) else np.zeros(len(paths))
    keys = [*zip(class_of.tolist(), paths, strict=True)]
    return images.take(np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64))


def check_has_groups(data: DataSet, group_by: str | None) -> None:
    """Check that `--data.group_by`, if it is set, has found a group of two images or more.

    Raises:
        WrongUsage: It has not.
    """
    if group_by is not None and not has_groups(data.splits):
        example = next(data.names(), "")
        raise WrongUsage(
            f"--data.group_by {group_by!r} finds no group of two images or more, for example none for {shown(example)}"
        )


def has_groups(splits: Mapping[str, Samples]) -> bool:
    """Return whether a group has more than one image."""
    ids = [samples.groups for samples in splits.values() if samples.groups is not None]
    return bool(ids) and len(np.unique(np.concatenate(ids))) < sum(map(len, ids))


def straddling_groups(splits: Mapping[str, Samples]) -> Iterator[str]:
    """Yield a warning for each two splits that hold images of one group."""
    for name, other_name in (("train", "val"), ("train", "test"), ("val", "test")):
        if name not in splits or other_name not in splits:
            continue
        samples = splits[name]
        other = splits[other_name]
        if samples.groups is None or other.groups is None:
            continue
        common = np.intersect1d(samples.groups, other.groups)
        if len(common):
            first = samples.paths[int((samples.groups == common[0]).argmax())]
            second = other.paths[int((other.groups == common[0]).argmax())]
            yield (
                f"{counted(len(common), 'group')} of images "
                f"{'is' if len(common) == 1 else 'are'} both in {name} and in {other_name}, "
                f"such as {shown(first)} and {shown(second)}: results on {other_name} are too good"
            )


def unequal_shares(data: DataSet, fractions: Mapping[str, float]) -> Iterator[str]:
    """Yield a line for each split whose share is far from its fraction: groups, or many rare classes, can cause that.

    Args:
        data: The data set.
        fractions: The requested fraction of all images for each split.
    """
    drawn = {name: part for name, part in data.splits.items() if part.is_drawn}
    train = data.splits["train"]
    if has_groups(data.splits):
        for name in ("val", "test"):
            is_asked_for = name == "val" or not data.has_splits
            if name not in data.splits and is_asked_for and fractions[name] > 0:
                num_groups = len(np.unique(train.groups)) if train.groups is not None else 0
                yield (
                    f"{name} has no images, because groups are not divided and are too few: "
                    f"{counted(num_groups, 'group')} in train"
                )
    total = len(train) + sum(map(len, drawn.values()))
    for name, part in drawn.items():
        share = len(part) / total
        wanted = fractions[name]
        by_chance = 2 * math.sqrt(wanted * (1 - wanted) / total)
        if abs(share - wanted) > max(_FAR_OFF * wanted, by_chance):
            yield (
                f"{name} has {share:.0%} of the images, not {wanted:.0%}, because images are split by class "
                "and groups are not divided: another --data.split_seed draws other images"
            )
