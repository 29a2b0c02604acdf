"""Mosaic images with several labels, made from a data set with one class per image."""

import csv
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

NUM_MOSAICS = {"train": 700, "val": 100, "test": 200}
TILE = 128  # pixels a side
_VAL_SHARE = 0.15  # of the training images of a class
_JPEG_QUALITY = 90


def write_mosaics(source: Path, folder: Path, seed: int) -> Path:
    """Write 1,000 mosaics with their table into a folder, and return the table.

    A mosaic has 2 x 2 images of four different classes, and the set of these classes as its labels. Each split has its
    own source images: those of `test` make the test mosaics, and the ones of `train` are divided at random.

    Args:
        source: Folder with train/CLASS and test/CLASS.
        folder: Where to write the images and labels.csv.
        seed: Seed of the division and of the mosaics.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for split, images in _source_images(source, rng).items():
        (folder / split).mkdir(parents=True)
        for index in range(NUM_MOSAICS[split]):
            names = rng.choice(sorted(images), 4, replace=False).tolist()
            tiles = [_tile(images[name][rng.integers(len(images[name]))]) for name in names]
            path = f"{split}/{index:04d}.jpg"
            mosaic = np.vstack([np.hstack(tiles[:2]), np.hstack(tiles[2:])])
            _, jpeg = cv2.imencode(".jpg", mosaic, [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])
            (folder / path).write_bytes(jpeg.tobytes())
            rows.append((path, ";".join(sorted(names)), split))
    table = folder / "labels.csv"
    with open(table, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("path", "labels", "split"), *rows])
    return table


def _source_images(source: Path, rng: np.random.Generator) -> dict[str, dict[str, Sequence[Path]]]:
    """Return the source images of each split by class."""
    images: dict[str, dict[str, Sequence[Path]]] = {split: {} for split in NUM_MOSAICS}
    for folder in sorted((source / "train").iterdir()):
        paths = sorted(folder.iterdir())
        order = rng.permutation(len(paths)).tolist()
        num_val = round(_VAL_SHARE * len(paths))
        images["val"][folder.name] = [paths[i] for i in order[:num_val]]
        images["train"][folder.name] = [paths[i] for i in order[num_val:]]
        images["test"][folder.name] = sorted((source / "test" / folder.name).iterdir())
    return images


def _tile(path: Path) -> np.ndarray:
    """Return the centre of an image, (TILE, TILE, 3) uint8 BGR."""
    image = cv2.imread(str(path))
    if image is None:
        raise ValueError(f"{path} cannot be read")
    side = min(image.shape[:2])
    top = (image.shape[0] - side) // 2
    left = (image.shape[1] - side) // 2
    centre = image[top : top + side, left : left + side]
    return cv2.resize(centre, (TILE, TILE), interpolation=cv2.INTER_AREA)
