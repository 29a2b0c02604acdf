"""Data modules on small folders, generated files of Fashion-MNIST, and the folder of real data."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.data.datamodule import ImageDataModule
from finetune.data.datasets.image_folder import ImageFolderData
from finetune.data.samples import PathList, Samples
from finetune.data.targets import ClassIndex


def real_data(name: str) -> Path:
    folder = os.environ.get("FINETUNE_TEST_DATA")
    if not folder:
        pytest.skip("FINETUNE_TEST_DATA names no folder of real images")
    return Path(folder) / name


def idx(array: np.ndarray) -> bytes:
    """The idx format of yann.lecun.com: zeros, type 8 for bytes, number of axes, sizes in big-endian, bytes."""
    return (
        bytes([0, 0, 8, array.ndim])
        + np.array(array.shape, ">u4").tobytes()
        + array.astype(np.uint8).tobytes()
    )


def clothes(num_train: int, num_test: int) -> dict[str, np.ndarray]:
    """Arrays by file name: noise in ten classes, each with a bright bar of its own."""
    rng, arrays = np.random.default_rng(0), {}
    for split, num in ("train", num_train), ("t10k", num_test):
        labels = rng.permutation(np.arange(num) % 10)
        pixels = rng.integers(0, 60, (num, 28, 28))
        for i, label in enumerate(labels):
            pixels[i, 4 + 2 * label : 6 + 2 * label] += 180
        arrays[f"{split}-images-idx3-ubyte"], arrays[f"{split}-labels-idx1-ubyte"] = pixels, labels
    return arrays


def write_unpacked(root: Path, num_train: int = 200, num_test: int = 50) -> Path:
    """Write `clothes` in torchvision's layout."""
    raw = root / "FashionMNIST/raw"
    raw.mkdir(parents=True)
    for name, array in clothes(num_train, num_test).items():
        (raw / name).write_bytes(idx(array))
    return root


def small(root: Path, **options: Any) -> ImageFolderData:
    plain = {"image_size": 24, "num_workers": 0, "min_crop": 0.08, "augmentations": None}
    return read(ImageFolderData(str(root), **{**plain, **options}))


def read(data: ImageFolderData) -> ImageFolderData:
    """Read the images now, before the test changes the files."""
    data.read()
    return data


def nowhere(num: int) -> Samples:
    """A split of this many images of one class. Their files do not exist."""
    return Samples(
        PathList(["nowhere.png"] * num), ClassIndex(np.zeros(num, np.int64), num_classes=1)
    )


def paths(data: ImageDataModule, split: str) -> list[str]:
    """The files of a split, as they lie in its root."""
    return [Path(path).relative_to(data.root).as_posix() for path in data.splits[split].paths]
