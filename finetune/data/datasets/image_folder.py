"""Data modules of image folders and tables: any labelled images, and the hotdog set."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from finetune.data.addresses import check_is_local
from finetune.data.corrected_samples import AppliedCorrections, Classes, correct_splits
from finetune.data.corrections import read_corrections
from finetune.data.data_settings import Splitting, required_folder
from finetune.data.datamodule import ImageDataModule
from finetune.data.datasets.download import fetch_archive
from finetune.data.datasets.folders import empty_classes
from finetune.data.datasets.image_source import ImageSource
from finetune.data.datasets.sources import choose_source
from finetune.data.datasets.table_source import TableSource
from finetune.data.groups import has_groups, put_into_groups
from finetune.data.samples import Samples
from finetune.data.scanned_data import ScannedData
from finetune.data.seen_record import build_record, fingerprint
from finetune.data.splits import (
    NOT_SET_APART,
    SET_APART,
    Units,
    fold_parts,
    hashes,
    stratified,
    units_of,
    with_each_label,
)
from finetune.data.storage import file_stats
from finetune.data.tables.table_rows import TableOptions
from finetune.data.targets import MultiHot, Targets
from finetune.distributed.signals import is_rank_zero
from finetune.system.file_names import composed
from finetune.system.messages import WrongUsage, shown


def fold_fault(
    targets: Targets, units: Units, settings: Splitting, val_fraction: float, names: Sequence[str]
) -> str:
    """Return what is wrong with the folds of a cross-validation, before the first of them trains; "" for nothing.

    Args:
        targets: The targets of all images that are split.
        units: The groups of these images.
        settings: The number of folds.
        val_fraction: Share of all images for validation.
        names: The classes.
    """
    num_folds = settings.num_folds or 0
    for fold in range(1, num_folds + 1):
        train, _, test = fold_parts(units, fold, num_folds, val_fraction)
        if not len(test):
            return f"fold {fold} of {num_folds} would test no image: take fewer folds"
        counts = targets.take(train).counts().tolist()
        if lacking := [name for name, num in zip(names, counts, strict=True) if not num]:
            return (
                f"fold {fold} of {num_folds} would have no images to train on of {', '.join(lacking)}: "
                "add some, skip them with --data.exclude, or take another number of folds"
            )
    return ""


class ImageFolderData(ImageDataModule):
    """Any labelled images: train/CLASS/*, optionally with val/ and test/, or only class folders; or a table."""

    reads_tables = True

    def scan(self) -> ScannedData:
        skips_faulty = self.on_bad_image == "skip"
        images = self.source.find(self.expected_classes, skips_faulty, is_rank_zero())
        class_names = images.class_names
        found = {
            split: put_into_groups(part, self.splitting.group_by)
            for split, part in images.splits.items()
        }
        parts, lacking, fault = self._split(found, class_names)
        # a missing file is an error where it would be trained or validated on
        is_lenient = skips_faulty or "train" not in found
        splits = {
            split: self._prepared(split, part, skip=is_lenient or split == "test")
            for split, part in parts.items()
            if len(part)
        }
        # after the split, so that no image moves to another one
        splits, corrections = self._corrected(splits, class_names, images.folder)
        if corrections is not None and "train" in splits:
            lacking = set(empty_classes(splits["train"], class_names))
        scanned = ScannedData(
            class_names,
            splits,
            label_kind=images.label_kind,
            folder=images.folder,
            remark=images.remark,
            skipped_rows=images.skipped,
            corrections=corrections,
            classes_without_images=tuple(name for name in class_names if name in lacking),
            fold_fault=fault,
        )
        return _recorded(_without_equal_weights(scanned)) if "train" in splits else scanned

    @cached_property
    def source(self) -> ImageSource:
        """The source of the images: the table, or else the result of `source_in`. The first use creates it."""
        if self.table is not None:
            return TableSource(Path(self.table), self.table_options())
        return self.source_in(required_folder(self.root))

    def source_in(self, folder: str) -> ImageSource:
        """Return the source of the images in a folder.

        A data set of its own creates or downloads a missing folder first. One process does this; the others wait.
        """
        return choose_source(folder, None, self.table_options())

    def table_options(self) -> TableOptions:
        """Return the settings by which a table is read. A folder has the same classes to exclude and to merge."""
        return TableOptions(
            root=self.table_root,
            columns=self.columns,
            separator=self.label_separator,
            labels=self.labels,
            exclude=frozenset(map(composed, self.exclude)),
            merge=self.merge,
        )

    def _split(
        self, found: dict[str, Samples], class_names: Sequence[str]
    ) -> tuple[dict[str, Samples], set[str], str]:
        """Split the images that have no split.

        Args:
            found: The images by split, as the source has them; `all` for images without splits.
            class_names: The classes.

        Returns:
            The images by split, without `all`; the classes without training images; and what is wrong with the folds.
        """
        fault = ""
        if "all" not in found and "train" not in found:
            return found, set(), fault
        settings = self.splitting
        everything = found["all"] if "all" in found else found["train"]
        names = list(everything.names())
        strata = everything.targets.strata()
        lacking = set(empty_classes(everything, class_names))
        if settings.fold is not None and settings.num_folds is not None:
            ids = hashes([*class_names, ""], settings.split_seed).view(np.int64)
            units = units_of(names, ids[strata], settings.split_seed, everything.groups)
            val_share = 0.0 if "val" in found else settings.val_fraction
            fault = fold_fault(everything.targets, units, settings, val_share, class_names)
            parts = fold_parts(units, settings.fold, settings.num_folds, val_share)
        elif "all" in found:
            fractions: tuple[float, ...] = (settings.val_fraction, settings.test_fraction)
            parts = stratified(names, strata, fractions, settings.split_seed, everything.groups)
        elif "val" not in found and settings.val_fraction > 0:
            fractions = (settings.val_fraction,)
            parts = stratified(names, strata, fractions, settings.split_seed, everything.groups)
        else:
            parts = [np.arange(len(everything))]
        if settings.fold is None and isinstance(everything.targets, MultiHot):
            groups = np.arange(len(names)) if everything.groups is None else everything.groups
            parts = with_each_label(everything.targets.labels, groups, parts)
        train = everything.take(parts[0])
        if "all" in found:
            train = replace(train, origin=NOT_SET_APART)
        if settings.fold is None and has_groups({"train": everything}):
            lacking |= set(empty_classes(train, class_names))
        splits = {name: part for name, part in found.items() if name != "all"}
        splits["train"] = train
        for name, rows in zip(("val", "test"), parts[1:], strict=False):
            if name not in splits or len(rows):
                splits[name] = replace(everything.take(rows), origin=SET_APART)
        return splits, lacking, fault

    def _corrected(
        self, splits: dict[str, Samples], class_names: Sequence[str], folder: str
    ) -> tuple[dict[str, Samples], AppliedCorrections | None]:
        """Return the splits with the corrected labels, and what the file of corrections changed; None without one."""
        if self.corrections is None:
            return splits, None
        return correct_splits(
            splits,
            read_corrections(self.corrections),
            folder,
            Classes(class_names, self.exclude, self.merge),
            self.correct_test,
        )

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.check_can_train()
        super().setup(stage)

    def check_can_train(self) -> None:
        """Check that each class has training images, and that there are groups if they were asked for.

        Raises:
            ValueError: A class has none, also in a fold; or all training images have the weight 0.
            WrongUsage: No group has more than one image.
        """
        settings = self.splitting
        if self.scanned.classes_without_images:
            raise ValueError(self._lacking_classes())
        if self.scanned.has_only_zero_weights:
            raise ValueError(
                f"all training images of {self.root} have the weight 0: correct the weights"
            )
        if self.scanned.fold_fault:
            raise ValueError(f"{self.root}: {self.scanned.fold_fault}")
        if settings.group_by is not None and not has_groups(self.splits):
            example = next(iter(self.splits["train"].names()), "")
            raise WrongUsage(
                f"--data.group_by {settings.group_by!r} finds no group of two images or more, for example none for "
                f"{shown(example)}"
            )

    def _lacking_classes(self) -> str:
        """Return the error message for classes without images to train on."""
        lacking = ", ".join(self.scanned.classes_without_images)
        message = f"{self.root} has no images to train on of {lacking}"
        if self.splitting.fold is None and has_groups(self.splits):
            seed = self.splitting.split_seed
            message += f" with split_seed {seed}, which does not divide groups"
        return f"{message}: add some, or remove that class"

    def use_all_images(self, split: str) -> None:
        before = self.scanned
        if split in before.splits and before.splits[split].origin != SET_APART:
            return
        skips_faulty = self.on_bad_image == "skip"
        found = self.source.find(before.class_names, skips_faulty, False).splits
        splits: dict[str, Samples] = {}
        corrections = before.corrections
        if "all" in found:
            found[split] = replace(found["all"], origin="all")
        if split in found:
            splits[split] = self._prepared(split, found[split], skip=True)
            splits, corrections = self._corrected(splits, before.class_names, before.folder)
        self.scanned = replace(before, splits=splits, corrections=corrections)

    def _prepared(self, split: str, samples: Samples, skip: bool) -> Samples:
        """Return samples with the stats of their files (see `file_stats`) and the size for decoding.

        Test images are decoded at their full size. All others are resized to `cache_size`. Only training images have
        weights: metrics count each image once.
        """
        shorter_side = None if split == "test" else self.preparation.cache_size
        stats = file_stats(samples.paths, skip=skip) if samples.stats is None else samples.stats
        weights = samples.weights if split == "train" else None
        return replace(samples, shorter_side=shorter_side, stats=stats, weights=weights)


def _without_equal_weights(scanned: ScannedData) -> ScannedData:
    """Return the data without the weights of the training images if all are equal, since only their ratios matter.

    Training is then the same as without weights, bit for bit.
    """
    train = scanned.splits["train"]
    if train.weights is None or train.weights.min() != train.weights.max():
        return scanned
    return replace(
        scanned,
        splits={**scanned.splits, "train": replace(train, weights=None)},
        remark=scanned.remark + "; the weights are equal in training and have no effect",
        has_only_zero_weights=not train.weights.any(),
    )


def _recorded(scanned: ScannedData) -> ScannedData:
    """Return the data with the record and the fingerprint of the training and validation images."""
    train = scanned.splits["train"]
    val = scanned.splits.get("val")
    seen = build_record(train, val)
    return replace(scanned, seen=seen, fingerprint=fingerprint(seen, train, val))


class Hotdog(ImageFolderData):
    """The hotdog / not-hotdog set of d2l.ai. It is downloaded if root does not exist."""

    default_root = "data/hotdog"
    url = "http://d2l-data.s3-accelerate.amazonaws.com/hotdog.zip"
    sha1 = "fba480ffa8aa7e0febbb511d181409f899b9baa5"

    def source_in(self, folder: str) -> ImageSource:
        check_is_local(folder)
        if not Path(folder).exists():
            fetch_archive(self.url, self.sha1, Path(folder))
        return super().source_in(folder)
