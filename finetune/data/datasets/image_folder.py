"""Data modules of image folders and tables: any labelled images, and the hotdog set."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from finetune.data.addresses import check_is_local
from finetune.data.corrected_samples import correct
from finetune.data.corrections import read_corrections
from finetune.data.data_set import DataSet, empty_classes
from finetune.data.data_settings import required_folder
from finetune.data.datamodule import ImageDataModule
from finetune.data.datasets.download import fetch_archive
from finetune.data.datasets.scan import scan
from finetune.data.drawn_splits import draw_splits
from finetune.data.faults import refuse_faults
from finetune.data.groups import has_groups, put_into_groups
from finetune.data.image_files import file_stats
from finetune.data.samples import Samples
from finetune.data.seen_record import fingerprint
from finetune.data.tables.table_scan import ScanOptions, scan_table
from finetune.distributed.signals import is_rank_zero
from finetune.system.file_names import composed
from finetune.system.messages import WrongUsage, counted, shown

log = logging.getLogger(__name__)

_NUM_LOGGED = 3  # faults that are skipped


class ImageFolderData(ImageDataModule):
    """Any labelled images: train/CLASS/*, optionally with val/ and test/, or only class folders; or a table."""

    reads_tables = True
    _undrawn: Mapping[str, Samples] | None = None  # before splits were drawn; None in a fit

    def scan(self) -> DataSet:
        skips_faulty = self.on_bad_image == "skip"
        found = put_into_groups(self._found(self.expected_classes), self.splitting.group_by)
        self._undrawn = found.splits
        if is_rank_zero():
            _log_notes(found)
        # a missing file is an error where it would be trained or validated on
        is_lenient = skips_faulty or "train" not in found.splits
        data = draw_splits(found, self.splitting)
        splits = {
            split: self._prepared(split, part, skip=is_lenient or split == "test")
            for split, part in data.splits.items()
            if len(part)
        }
        # after the split, so that no image moves to another one
        data = self._corrected(replace(data, splits=splits))
        if data.corrections is not None:
            self._undrawn = _still_in(data, found.splits)
        return _recorded(_without_equal_weights(data)) if "train" in data.splits else data

    def _found(self, class_names: list[str] | None) -> DataSet:
        """Return the images of the folder or table. A data set of its own is created or downloaded if it is missing.

        Raises:
            OSError: The place cannot be read.
            ValueError: The data set has a fault.
        """
        options = ScanOptions(
            root=self.table_root,
            columns=self.columns,
            separator=self.label_separator,
            labels=self.labels,
            exclude=frozenset(map(composed, self.exclude)),
            merge=self.merge,
        )
        if self.table is not None:
            data = scan_table(Path(self.table), options, class_names)
        else:
            data = scan(self.place_in(required_folder(self.root)), options, class_names)
        refuse_faults(data.faults, skip=self.on_bad_image == "skip")
        return data

    def place_in(self, folder: str) -> str:
        """Return the folder or the table that holds the data set of a folder.

        A data set of its own creates or downloads a missing folder first. One process does this; the others wait.
        """
        return folder

    def _corrected(self, data: DataSet) -> DataSet:
        """Return the data set with the corrected labels, if there is a file of corrections."""
        if self.corrections is None:
            return data
        decisions = read_corrections(self.corrections)
        return correct(
            data, self.corrections, decisions, self.exclude, self.merge, self.correct_test
        )

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.check_can_train()
            self._undrawn = None  # as large as the list of the images
        super().setup(stage)

    def check_can_train(self) -> None:
        """Check that each class has training images, and that there are groups if they were asked for.

        Raises:
            ValueError: A class has none, also in a fold; or all training images have the weight 0.
            WrongUsage: No group has more than one image.
        """
        settings = self.splitting
        if self.scanned.training_faults:
            raise ValueError(f"{self.root}: {self.scanned.training_faults[0]}")
        lacking = self.class_names
        if "train" in self.splits:
            lacking = empty_classes(self.splits["train"].targets, self.class_names)
        if lacking:
            message = f"{self.root} has no images to train on of {', '.join(lacking)}"
            if settings.fold is None and has_groups(self.splits):
                message += f" with split_seed {settings.split_seed}, which does not divide groups"
            raise ValueError(f"{message}: add some, or remove that class")
        if settings.group_by is not None and not has_groups(self.splits):
            example = next(iter(self.splits["train"].names()), "")
            raise WrongUsage(
                f"--data.group_by {settings.group_by!r} finds no group of two images or more, for example none for "
                f"{shown(example)}"
            )

    def use_all_images(self, split: str) -> None:
        before = self.scanned
        if self.splitting.fold is not None:  # the split is that of the fold
            return
        if split in before.splits and not before.splits[split].is_drawn:
            return
        undrawn = self._undrawn or {}
        found = undrawn.get("all", undrawn.get(split))
        if found is None:
            return
        data = replace(before, splits={split: self._prepared(split, found, skip=True)})
        self.scanned = self._corrected(data)

    def _prepared(self, split: str, samples: Samples, skip: bool) -> Samples:
        """Return samples with the stats of their files (see `file_stats`) and the size for decoding.

        Test images are decoded at their full size. All others are resized to `cache_size`. Only training images have
        weights: metrics count each image once.
        """
        shorter_side = None if split == "test" else self.preparation.cache_size
        stats = file_stats(samples.paths, skip=skip) if samples.stats is None else samples.stats
        weights = samples.weights if split == "train" else None
        return replace(samples, shorter_side=shorter_side, stats=stats, weights=weights)


def _still_in(data: DataSet, found: Mapping[str, Samples]) -> dict[str, Samples]:
    """Return images without those that corrections have excluded from a data set."""
    paths = {path for part in data.splits.values() for path in part.paths}
    return {
        split: part.take(np.flatnonzero([path in paths for path in part.paths]))
        for split, part in found.items()
    }


def _log_notes(data: DataSet) -> None:
    """Log what was skipped in a data set, and what looks like a mistake."""
    if data.faults:
        num_rows = len({fault.row for fault in data.faults} - {-1})
        what = counted(num_rows, "row") if num_rows else counted(len(data.faults), "folder")
        examples = "; ".join(fault.line() for fault in data.faults[:_NUM_LOGGED])
        more = "; …" if len(data.faults) > _NUM_LOGGED else ""
        log.warning("%s: skipped %s: %s%s", data.place, what, examples, more)
    for note in data.notes:
        log.warning("%s", note)


def _without_equal_weights(data: DataSet) -> DataSet:
    """Return the data set without the weights of the training images if all are equal: only their ratios matter.

    Training is then the same as without weights, bit for bit.
    """
    train = data.splits["train"]
    if train.weights is None or train.weights.min() != train.weights.max():
        return data
    faults = data.training_faults
    if not train.weights.any():
        faults += ("all training images have the weight 0: correct the weights",)
    return replace(
        data,
        splits={**data.splits, "train": replace(train, weights=None)},
        remark=data.remark + "; the weights are equal in training and have no effect",
        training_faults=faults,
    )


def _recorded(data: DataSet) -> DataSet:
    """Return the data set with the fingerprint of the training and validation images."""
    return replace(data, fingerprint=fingerprint(data.splits["train"], data.splits.get("val")))


class Hotdog(ImageFolderData):
    """The hotdog / not-hotdog set of d2l.ai. It is downloaded if root does not exist."""

    default_root = "data/hotdog"
    url = "http://d2l-data.s3-accelerate.amazonaws.com/hotdog.zip"
    sha1 = "fba480ffa8aa7e0febbb511d181409f899b9baa5"

    def place_in(self, folder: str) -> str:
        check_is_local(folder)
        if not Path(folder).exists():
            fetch_archive(self.url, self.sha1, Path(folder))
        return folder
