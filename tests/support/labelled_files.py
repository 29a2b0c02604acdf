"""Small images with several labels each, and a data module that reads the labels from file names."""

from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np

from finetune.data.data_set import DataSet
from finetune.data.datamodule import ImageDataModule
from finetune.data.image_files import file_stats
from finetune.data.samples import PathList, Samples
from finetune.data.seen import fingerprint
from finetune.data.splits import stratified
from finetune.data.targets import MultiHot

LABELS = ("blue", "green", "red", "square")
SHARES = (0.5, 0.4, 0.3, 0.1)  # of the images that have each label


def draw_labelled(root: Path, seed: int = 0, **num_images: int) -> Path:
    """Write `split=n` noisy images of 48 x 48 pixels, each a mosaic of quarters, one for each of its labels.

    A file is named after its number and its labels: `0007+blue+red.png`.
    """
    rng = np.random.default_rng(seed)
    for split, num in num_images.items():
        (root / split).mkdir(parents=True)
        for i in range(num):
            has_label = rng.random(len(LABELS)) < SHARES
            image = rng.integers(0, 120, (48, 48, 3)).astype(np.uint8)
            for k, quarter in zip(np.flatnonzero(has_label), rng.permutation(4), strict=False):
                top, left = 24 * (quarter // 2), 24 * (quarter % 2)
                if k < 3:  # BGR, as OpenCV has it
                    image[top : top + 24, left : left + 24, k] += 70
                else:
                    image[top + 6 : top + 18, left + 6 : left + 18] = 255
            names = "".join(f"+{LABELS[k]}" for k in np.flatnonzero(has_label))
            cv2.imwrite(str(root / split / f"{i:04d}{names}.png"), image)
    return root


class LabelledFiles(ImageDataModule):
    """Images whose names hold their labels: `train/0007+blue+red.png`, and optionally `test/`."""

    def scan(self) -> DataSet:
        folder = Path(self.root)
        train = _read(folder / "train")
        rest, val = stratified(
            train.names(),
            train.targets.strata(),
            (self.settings.val_fraction,),
            self.settings.split_seed,
        )
        splits = {"train": train.take(rest)}
        if len(val):
            splits["val"] = replace(train.take(val), is_drawn=True)
        if (folder / "test").is_dir():
            splits["test"] = _read(folder / "test")
        return DataSet(
            list(LABELS),
            splits,
            folder=str(folder),
            label_kind="several",
            has_splits=True,
            fingerprint=fingerprint(splits["train"], splits.get("val")),
        )


def _read(folder: Path) -> Samples:
    paths = sorted(str(path) for path in folder.iterdir())
    rows = [[name in Path(path).stem.split("+") for name in LABELS] for path in paths]
    return Samples(
        PathList(paths),
        MultiHot(np.array(rows, np.uint8).reshape(len(rows), len(LABELS))),
        folder=str(folder.parent),
        stats=file_stats(paths),
    )
