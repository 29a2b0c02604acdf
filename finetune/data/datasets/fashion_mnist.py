"""The data module of Fashion-MNIST."""

import hashlib
from itertools import count
from pathlib import Path

from finetune.data.datamodule import ImageDataModule
from finetune.data.datasets.fashion_mnist_files import CLASS_NAMES, is_beneath, obtain, read
from finetune.data.readers import GreyReader, PathList
from finetune.data.seen_record import seen_by
from finetune.data.splits import SET_APART, Split, stratified
from finetune.system.messages import WrongUsage


class FashionMNIST(ImageDataModule):
    """Fashion-MNIST by torchvision: grey 28x28 pictures of clothes, as RGB at the network's input size."""

    default_root = "data/fashion-mnist"

    def obtain(self, root: Path) -> None:
        if self.exclude:
            raise WrongUsage(
                "--data.exclude leaves out class folders, and Fashion-MNIST has none: drop the option"
            )
        obtain(root)

    @classmethod
    def is_in(cls, root: Path) -> bool:
        return is_beneath(root)

    def scan(self, root: Path, val_fraction: float, test_fraction: float, split_seed: int) -> None:
        if not self.class_names:
            self.class_names = list(CLASS_NAMES)
        pixels, labels = read(root, "train")
        counters = [count() for _ in self.class_names]  # numbered by class, each is split evenly
        numbered = (f"{label}/{next(counters[label])}" for label in labels.tolist())
        rest, val = stratified(numbered, labels, (val_fraction,), split_seed)
        self.fingerprint = hashlib.sha256(pixels[rest].tobytes()).hexdigest()
        for split, indices, origin in (
            ("train", rest, "its training pictures"),
            ("val", val, SET_APART),
        ):
            if len(indices):
                names = PathList(f"train/{i}" for i in indices)
                self.splits[split] = Split(
                    GreyReader(pixels[indices]), labels[indices], names, origin
                )
        self.splits["test"] = test_split(root)
        self.seen = seen_by(self.splits["train"], self.splits.get("val"), skip=True)


def test_split(root: Path) -> Split:
    """Return the test pictures of files that are ready in `root`.

    Raises:
        RuntimeError: They are not there.
    """
    pixels, labels = read(root, "test")
    return Split(
        GreyReader(pixels),
        labels,
        PathList(f"test/{i}" for i in range(len(labels))),
        "its test pictures",
    )
