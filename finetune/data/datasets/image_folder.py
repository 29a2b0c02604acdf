"""Data modules of picture files: any folder of labelled ones, and the hotdog set."""

from pathlib import Path

from finetune.data.datamodule import ImageDataModule
from finetune.data.datasets.download import fetch_archive
from finetune.data.datasets.folders import Files, scan
from finetune.data.readers import FileReader
from finetune.data.seen_record import seen_by, with_digests
from finetune.data.splits import SET_APART, Split, stratified
from finetune.distributed.signals import is_first_process


class ImageFolderData(ImageDataModule):
    """Any folder of labelled pictures: train/CLASS/*, with val/ and test/ if there, or class folders alone."""

    untaught: tuple[str, ...] = ()  # classes, where they were given, without a picture to train on

    def scan(self, root: Path, val_fraction: float, test_fraction: float, split_seed: int) -> None:
        is_skipped, is_told = self.on_bad_image == "skip", is_first_process()
        self.class_names, files = scan(
            root, self.class_names or None, is_skipped, is_told, self.exclude
        )
        self.untaught = next(
            (files[split].empty for split in ("all", "train") if split in files), ()
        )
        origins = {split: f"its {Path(part.folder).name} folder" for split, part in files.items()}
        if "all" in files:
            everything = files.pop("all")
            parts = stratified(
                everything.names(), everything.labels, (val_fraction, test_fraction), split_seed
            )
            files = dict(zip(("train", "val", "test"), map(everything.take, parts), strict=True))
            origins = {"train": "all that are not set apart", "val": SET_APART, "test": SET_APART}
        elif "train" in files and "val" not in files and val_fraction > 0:
            given = files["train"]
            rest, val = stratified(given.names(), given.labels, (val_fraction,), split_seed)
            files |= {"train": given.take(rest), "val": given.take(val)}
            origins["val"] = SET_APART
        found = {
            split: self._split(split, part, origins[split])
            for split, part in files.items()
            if len(part.labels)
        }
        self.splits |= found
        if "train" in found:
            self.seen = seen_by(found["train"], found.get("val"), self.on_bad_image == "skip")
            self.fingerprint = self.seen.fingerprint(found["train"].labels)

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.check_taught()
            # which writes checkpoints
            if self.seen and self.seen.digests is None and is_first_process():
                self.seen = with_digests(self.seen, self.splits["train"], self.splits.get("val"))
        super().setup(stage)

    def check_taught(self) -> None:
        """Make sure that there are pictures of each class to train on.

        Raises:
            ValueError: There are none of some.
        """
        if self.untaught:
            lacking = ", ".join(self.untaught)
            raise ValueError(
                f"{self.root} has no pictures to train on of {lacking}: add some, or leave out that class"
            )

    def take_whole(self, split: str) -> None:
        if split in self.splits and self.splits[split].origin != SET_APART:
            return
        files = scan(
            self.folder,
            self.class_names,
            self.on_bad_image == "skip",
            False,
            self.exclude,
        )[1]
        self.splits = {split: self._split(split, files["all"], "all")} if "all" in files else {}

    def _split(self, split: str, files: Files, origin: str) -> Split:
        read = FileReader(files.paths, self.cache_size if split != "test" else None)
        tag = "" if split == "train" or origin in (SET_APART, "all") else f"{split}/"
        return Split(read, files.labels, files.paths, origin, files.folder, tag)


class Hotdog(ImageFolderData):
    """The hotdog / not-hotdog set of d2l.ai, fetched where root does not exist; any folder in its layout will do."""

    default_root = "data/hotdog"
    url = "http://d2l-data.s3-accelerate.amazonaws.com/hotdog.zip"
    sha1 = "fba480ffa8aa7e0febbb511d181409f899b9baa5"

    def obtain(self, root: Path) -> Path:
        if not root.exists():
            fetch_archive(self.url, self.sha1, root)
        return root
