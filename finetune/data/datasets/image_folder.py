"""Data modules of image folders and tables: any labelled images, and the hotdog set."""

import logging
from dataclasses import replace
from pathlib import Path

from finetune.data.addresses import check_is_local
from finetune.data.corrections import correct, read_corrections
from finetune.data.data_set import DataSet, empty_classes
from finetune.data.data_settings import required_folder
from finetune.data.datamodule import ImageDataModule
from finetune.data.datasets.download import fetch_archive
from finetune.data.datasets.scan import scan
from finetune.data.drawn_splits import (
    check_has_groups,
    draw_splits,
    has_groups,
    joined,
    put_into_groups,
)
from finetune.data.faults import refuse_faults
from finetune.data.listing import ScanOptions
from finetune.data.seen import fingerprint
from finetune.distributed.signals import is_rank_zero
from finetune.system.file_names import composed
from finetune.system.messages import counted

log = logging.getLogger(__name__)

_NUM_LOGGED = 3  # faults that are skipped


class ImageFolderData(ImageDataModule):
    """Any labelled images: train/CLASS/*, optionally with val/ and test/, or only class folders; or a table."""

    reads_tables = True

    def scan(self) -> DataSet:
        options = ScanOptions(
            root=self.settings.root if self.table is not None else None,
            columns=self.columns,
            separator=self.settings.label_separator,
            labels=self.settings.labels,
            exclude=frozenset(map(composed, self.settings.exclude or [])),
            merge=self.merge,
        )
        place = self.table or self.place_in(required_folder(self.root))
        data = scan(place, options, self.expected_classes)
        refuse_faults(data.faults, skip=self.on_bad_image == "skip")
        data = put_into_groups(data, self.settings.group_by)
        if is_rank_zero():
            _log_notes(data)
        data = draw_splits(data, self.settings)
        # weights are for training only: metrics count each image once
        splits = {
            name: part if name == "train" else replace(part, weights=None)
            for name, part in data.splits.items()
        }
        data = replace(data, splits=splits)
        if self.corrections is not None:
            # after the split, so that no image moves to another one
            decisions = read_corrections(self.corrections)
            data = correct(data, self.corrections, decisions, options, self.settings.correct_test)
        if "train" not in data.splits:
            return data
        data = _without_equal_weights(data)
        record = fingerprint(data.splits["train"], data.splits.get("val"))
        return replace(data, fingerprint=record)

    def place_in(self, folder: str) -> str:
        """Return the folder or the table that holds the data set of a folder.

        A data set of its own creates or downloads a missing folder first. One process does this; the others wait.
        """
        return folder

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
        settings = self.settings
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
        check_has_groups(self.scanned, settings.group_by)

    def use_all_images(self, split: str) -> None:
        data = self.scanned
        if not data.has_splits and self.settings.fold is None:
            self.scanned = replace(data, splits={split: joined([*data.splits.values()])})


def _log_notes(data: DataSet) -> None:
    """Log what was skipped in a data set, and what looks like a mistake."""
    if data.faults:
        what = counted(len(data.faults), "fault")
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
