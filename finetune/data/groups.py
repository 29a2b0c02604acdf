"""Groups of images that share a split, such as the images of one patient, video or tile, from their paths."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from finetune.data.data_set import DataSet
from finetune.data.samples import Samples
from finetune.data.splits import group_ids
from finetune.system.messages import WrongUsage, counted, shown

FOLDER = "folder"
_FAR_OFF = 1 / 3  # of the requested fraction


def check_group_by(group_by: str | None) -> None:
    """Check `--data.group_by`.

    Raises:
        WrongUsage: It is neither `folder` nor a regular expression.
    """
    try:
        re.compile(group_by or FOLDER)
    except (re.error, RecursionError, OverflowError) as error:
        raise WrongUsage(
            f"--data.group_by {group_by!r} is neither {FOLDER} nor a regular expression: {error}"
        ) from error
    if group_by == "":
        raise WrongUsage(f"--data.group_by is empty: pass {FOLDER} or a regular expression")


def is_pattern(group_by: str | None) -> bool:
    """Return whether images are grouped by a regular expression. One of an untrusted file could take for ever."""
    return group_by not in (None, FOLDER)


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
    splits = {
        split: replace(samples, groups=group_ids(_group_names(data, samples.names(), group_by)))
        for split, samples in data.splits.items()
    }
    return replace(data, splits=splits)


def _group_names(data: DataSet, names: Iterable[str], group_by: str) -> Iterator[str]:
    pattern = re.compile(group_by)
    for name in names:
        from_class = data.from_class(name)
        if group_by == FOLDER:
            group = "/".join(from_class.split("/")[1:-1])
        else:
            match = pattern.search(from_class)
            group = (match[1 if pattern.groups else 0] or "") if match else ""
        yield group or name


def has_groups(splits: Mapping[str, Samples]) -> bool:
    """Return whether a group has more than one image."""
    ids = [samples.groups for samples in splits.values() if samples.groups is not None]
    return bool(ids) and len(np.unique(np.concatenate(ids))) < sum(map(len, ids))


def straddling_groups(splits: Mapping[str, Samples]) -> Iterator[str]:
    """Yield a warning for each two splits that hold images of one group."""
    names = [name for name in ("train", "val", "test") if name in splits]
    for i, name in enumerate(names):
        for other_name in names[i + 1 :]:
            samples = splits[name]
            other = splits[other_name]
            if samples.groups is None or other.groups is None:
                continue
            common = np.intersect1d(samples.groups, other.groups)
            if len(common):
                first = samples.paths[int(np.flatnonzero(samples.groups == common[0])[0])]
                second = other.paths[int(np.flatnonzero(other.groups == common[0])[0])]
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
