"""Draw the splits of a data set that it does not have itself."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from finetune.data.data_set import DataSet, empty_classes
from finetune.data.image_files import concatenate_stats
from finetune.data.samples import PathList, Samples
from finetune.data.splits import Units, fold_parts, hashes, stratified, units_of, with_each_label
from finetune.data.targets import ClassIndex, MultiHot, Targets
from finetune.settings.schema import DataSettings


def draw_splits(data: DataSet, settings: DataSettings) -> DataSet:
    """Return the data set with a validation and a test split, and without `all`.

    Images without splits are drawn for both. Without a validation split its images are drawn from those of training.
    Folds are drawn from all images without a split, or from those of training.

    Args:
        data: The data set. Without training images it is returned as it is.
        settings: The fractions, the seed and the fold.
    """
    if "all" not in data.splits and "train" not in data.splits:
        return data
    everything = data.splits["all"] if "all" in data.splits else data.splits["train"]
    faults = data.training_faults
    if settings.fold is not None and settings.num_folds is not None:
        units = _units(everything, data.class_names, settings)
        val_share = 0.0 if "val" in data.splits else settings.val_fraction
        faults += _fold_faults(everything.targets, units, settings, val_share, data.class_names)
        parts = fold_parts(units, settings.fold, settings.num_folds, val_share)
    else:
        parts = _parts(data, everything, settings)
    splits = {name: part for name, part in data.splits.items() if name != "all"}
    splits["train"] = everything.take(parts[0])
    for name, rows in zip(("val", "test"), parts[1:], strict=False):
        if len(rows):
            splits[name] = replace(everything.take(rows), is_drawn=True)
    return replace(data, splits=splits, training_faults=faults)


def joined(parts: Sequence[Samples]) -> Samples:
    """Return the images of splits that were drawn as one split that was not, by class and path."""
    first = parts[0]
    paths = [path for part in parts for path in part.paths]
    labels = np.concatenate([part.targets.labels for part in parts])
    class_of = labels if isinstance(first.targets, ClassIndex) else np.zeros(len(paths))
    groups = [part.groups for part in parts if part.groups is not None]
    images = replace(
        first,
        paths=PathList(paths),
        targets=replace(first.targets, labels=labels),
        cached=None,
        facts=None,
        stats=concatenate_stats([part.load_stats() for part in parts]),
        groups=np.concatenate(groups) if groups else None,
        weights=None,
        is_drawn=False,
    )
    order = sorted(range(len(paths)), key=lambda i: (class_of[i], paths[i]))
    return images.take(np.array(order, np.int64))


def _parts(data: DataSet, everything: Samples, settings: DataSettings) -> list[np.ndarray]:
    """Return the images of training, of validation, and of test if the data set has no splits."""
    if "all" in data.splits:
        fractions: tuple[float, ...] = (settings.val_fraction, settings.test_fraction)
    elif "val" not in data.splits and settings.val_fraction > 0:
        fractions = (settings.val_fraction,)
    else:
        return [np.arange(len(everything))]
    names = everything.names()
    strata = everything.targets.strata()
    parts = stratified(names, strata, fractions, settings.split_seed, everything.groups)
    if isinstance(everything.targets, MultiHot):
        groups = np.arange(len(everything)) if everything.groups is None else everything.groups
        parts = with_each_label(everything.targets.labels, groups, parts)
    return parts


def _units(everything: Samples, class_names: list[str], settings: DataSettings) -> Units:
    ids = hashes([*class_names, ""], settings.split_seed).view(np.int64)
    strata = ids[everything.targets.strata()]
    return units_of(everything.names(), strata, settings.split_seed, everything.groups)


def _fold_faults(
    targets: Targets,
    units: Units,
    settings: DataSettings,
    val_fraction: float,
    class_names: list[str],
) -> tuple[str, ...]:
    """Return what is wrong with the first faulty fold of a cross-validation, before any fold trains; () for nothing."""
    num_folds = settings.num_folds or 0
    for fold in range(1, num_folds + 1):
        train, _, test = fold_parts(units, fold, num_folds, val_fraction)
        if not len(test):
            return (f"fold {fold} of {num_folds} would test no image: take fewer folds",)
        if lacking := empty_classes(targets.take(train), class_names):
            return (
                f"fold {fold} of {num_folds} would have no images to train on of {', '.join(lacking)}: "
                "add some, skip them with --data.exclude, or take another number of folds",
            )
    return ()
