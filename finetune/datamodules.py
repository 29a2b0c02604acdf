"""Data modules: any folder of labelled pictures, the hotdog set, Fashion-MNIST and the drawn sample."""

import hashlib
from itertools import count
from pathlib import Path

import numpy as np

from finetune import fashion_mnist
from finetune.distributed.signals import is_first_process
from finetune.download import fetch_archive
from finetune.folders import Files, scan
from finetune.picture_data import PictureData
from finetune.pictures import FileReader, GreyReader, PathList
from finetune.seen import seen_by
from finetune.splits import SET_APART, Split, stratified


class ImageFolderData(PictureData):
    """Any folder of labelled pictures: train/CLASS/*, with val/ and test/ if there, or class folders alone."""

    def scan(self, root: Path, val_fraction: float, test_fraction: float, split_seed: int) -> None:
        self.class_names, files = scan(root, self.class_names or None, self.on_bad_image == "skip", is_first_process())
        origins = {split: f"its {Path(part.folder).name} folder" for split, part in files.items()}
        if "all" in files:
            everything = files.pop("all")
            parts = stratified(everything.names(), everything.labels, (val_fraction, test_fraction), split_seed)
            files = dict(zip(("train", "val", "test"), map(everything.take, parts), strict=True))
            origins = {"train": "all that are not set apart", "val": SET_APART, "test": SET_APART}
        elif "train" in files and "val" not in files and val_fraction > 0:
            given = files["train"]
            rest, val = stratified(given.names(), given.labels, (val_fraction,), split_seed)
            files |= {"train": given.take(rest), "val": given.take(val)}
            origins["val"] = SET_APART
        found = {split: self._split(split, part, origins[split]) for split, part in files.items() if len(part.labels)}
        self.splits |= found
        if "train" in found:
            self.seen = seen_by(found["train"], found.get("val"), self.on_bad_image == "skip")
            self.fingerprint = self.seen.fingerprint(found["train"].labels)

    def take_whole(self, split: str) -> None:
        if split in self.splits and self.splits[split].origin != SET_APART:
            return
        files = scan(Path(self.root or ""), self.class_names, self.on_bad_image == "skip", is_told=False)[1]
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

    def obtain(self, root: Path) -> None:
        if not root.exists():
            fetch_archive(self.url, self.sha1, root)


class SampleData(ImageFolderData):
    """Drawn food, made where root does not exist; root ends in source (8 dishes) or target (hotdog or not)."""

    default_root = "data/sample/target"

    def obtain(self, root: Path) -> None:
        if not root.exists():
            from finetune.sample import write_sample

            if root.name not in ("source", "target"):
                raise ValueError(f"--data.root {root}: the sample's folder is called source or target")
            write_sample(root.parent, "source" if root.name == "source" else "target")


class FashionMNIST(PictureData):
    """Fashion-MNIST by torchvision: grey 28x28 pictures of clothes, as RGB at the network's input size."""

    default_root = "data/fashion-mnist"

    def obtain(self, root: Path) -> None:
        fashion_mnist.obtain(root)

    def scan(self, root: Path, val_fraction: float, test_fraction: float, split_seed: int) -> None:
        source = {"train": fashion_mnist.read(root, "train"), "test": fashion_mnist.read(root, "test")}
        if not self.class_names:
            self.class_names = list(fashion_mnist.CLASS_NAMES)
        pixels, labels = source["train"]
        counters = [count() for _ in self.class_names]  # numbered by class, each is split evenly
        numbered = (f"{label}/{next(counters[label])}" for label in labels.tolist())
        rest, val = stratified(numbered, labels, (val_fraction,), split_seed)
        self.fingerprint = hashlib.sha256(pixels[rest].tobytes()).hexdigest()
        everything = {
            "train": ("train", rest, "its training pictures"),
            "val": ("train", val, SET_APART),
            "test": ("test", np.arange(len(source["test"][1])), "its test pictures"),
        }
        for split, (part, indices, origin) in everything.items():
            if len(indices):
                pixels, labels = source[part]
                names = PathList(f"{part}/{i}" for i in indices)
                self.splits[split] = Split(GreyReader(pixels[indices]), labels[indices], names, origin)
        self.seen = seen_by(self.splits["train"], self.splits.get("val"), skip=True)
