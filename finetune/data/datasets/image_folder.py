"""Data modules of image folders and tables: any labelled images, and the hotdog set."""

from dataclasses import replace
from pathlib import Path

from finetune.data.datamodule import ImageDataModule
from finetune.data.datasets.class_changes import ClassChanges
from finetune.data.datasets.download import fetch_archive
from finetune.data.datasets.folder_source import FolderSource
from finetune.data.datasets.folders import empty_classes
from finetune.data.datasets.image_source import ImageSource
from finetune.data.datasets.table_source import TableSource
from finetune.data.samples import Samples
from finetune.data.seen_record import add_digests, build_record
from finetune.data.splits import SET_APART, stratified
from finetune.data.storage import file_stats
from finetune.data.tables.table_rows import TableOptions
from finetune.distributed.signals import is_rank_zero
from finetune.system.file_names import composed


class ImageFolderData(ImageDataModule):
    """Any labelled images: train/CLASS/*, optionally with val/ and test/, or only class folders; or a table."""

    # classes without training images, if `class_names` was given
    classes_without_images: tuple[str, ...] = ()

    def scan(self, root: Path, val_fraction: float, test_fraction: float, split_seed: int) -> None:
        is_skipped = self.on_bad_image == "skip"
        images = self.source(root).find(self.class_names or None, is_skipped, is_rank_zero())
        self.class_names = images.class_names
        self.folder = images.folder
        self.label_kind = images.label_kind
        self.remark = images.remark
        self.skipped_rows = images.skipped
        found = images.splits
        of_training = found.get("all", found.get("train"))
        if of_training is not None:
            self.classes_without_images = tuple(empty_classes(of_training, self.class_names))
        if "all" in found:
            everything = found.pop("all")
            fractions = (val_fraction, test_fraction)
            parts = stratified(
                everything.names(), everything.targets.strata(), fractions, split_seed
            )
            origins = ("all that are not set apart", SET_APART, SET_APART)
            for split, rows, origin in zip(("train", "val", "test"), parts, origins, strict=True):
                found[split] = replace(everything.take(rows), origin=origin)
        elif "train" in found and "val" not in found and val_fraction > 0:
            everything = found["train"]
            rest, val = stratified(
                everything.names(), everything.targets.strata(), (val_fraction,), split_seed
            )
            found["train"] = everything.take(rest)
            found["val"] = replace(everything.take(val), origin=SET_APART)
        # a missing file is an error where it would be trained or validated on
        is_lenient = is_skipped or "train" not in found
        self.splits |= {
            split: self._prepared(split, part, skip=is_lenient or split == "test")
            for split, part in found.items()
            if len(part)
        }
        if "train" in self.splits:
            self.seen = build_record(self.splits["train"], self.splits.get("val"))
            self.fingerprint = self.seen.fingerprint(self.splits["train"].targets)

    def source(self, folder: Path) -> ImageSource:
        """Return the source of the images: the table, or else a folder."""
        if self.table is None:
            return FolderSource(folder, ClassChanges(self.exclude, self.merge))
        options = TableOptions(
            root=None if self.table_root is None else Path(self.table_root),
            columns=self.columns,
            separator=self.label_separator,
            labels=self.labels,
            exclude=frozenset(map(composed, self.exclude)),
            merge=self.merge,
        )
        return TableSource(Path(self.table), options)

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.check_train_classes()
            # only on rank 0, which writes checkpoints
            if self.seen and self.seen.digests is None and is_rank_zero():
                self.seen = add_digests(self.seen, self.splits["train"], self.splits.get("val"))
        super().setup(stage)

    def check_train_classes(self) -> None:
        """Check that each class has training images.

        Raises:
            ValueError: A class has none.
        """
        if self.classes_without_images:
            lacking = ", ".join(self.classes_without_images)
            raise ValueError(
                f"{self.root} has no images to train on of {lacking}: add some, or remove that class"
            )

    def use_all_images(self, split: str) -> None:
        if split in self.splits and self.splits[split].origin != SET_APART:
            return
        is_skipped = self.on_bad_image == "skip"
        found = self.source(self.folder).find(self.class_names, is_skipped, False).splits
        self.splits = {}
        if "all" in found:
            everything = self._prepared(split, found["all"], skip=True)
            self.splits[split] = replace(everything, origin="all")

    def _prepared(self, split: str, samples: Samples, skip: bool) -> Samples:
        """Return samples with the stats of their files (see `file_stats`) and the size for decoding.

        Test images are decoded at their full size. All others are resized to `cache_size`.
        """
        shorter_side = None if split == "test" else self.cache_size
        stats = file_stats(samples.paths, skip=skip) if samples.stats is None else samples.stats
        return replace(samples, shorter_side=shorter_side, stats=stats)


class Hotdog(ImageFolderData):
    """The hotdog / not-hotdog set of d2l.ai. It is downloaded if root does not exist."""

    default_root = "data/hotdog"
    url = "http://d2l-data.s3-accelerate.amazonaws.com/hotdog.zip"
    sha1 = "fba480ffa8aa7e0febbb511d181409f899b9baa5"

    def obtain(self, root: Path) -> Path:
        if not root.exists():
            fetch_archive(self.url, self.sha1, root)
        return root
