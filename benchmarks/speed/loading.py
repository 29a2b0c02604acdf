"""Measure how fast image files become batches on one core: torchvision's loader, and ours.

    python -m benchmarks.speed loading --root FOLDER

One process on one core, libraries with one thread, batches of 64, `num_workers` 0. torchvision: ImageFolder,
RandomResizedCrop, flip, ToTensor, Normalize, DataLoader. Ours: ImageFolderData with its defaults; its batches are
uint8, since the network normalises. Each round takes the loaders in turn, every image of root/train once for each.
`first pass` decodes all images, writes the cache and brings it to the disk, then reads an epoch from it; `later
pass` is an epoch after it. The table has rates per second of the core's time, which other programs on the machine
hardly change; records have those by the clock, too.
"""

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {"OMP_NUM_THREADS": "1", "NO_ALBUMENTATIONS_UPDATE": "1"}

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerFn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from benchmarks.common.driver import Benchmark
from benchmarks.common.records import Record
from benchmarks.common.tables import markdown, spread
from finetune import ImageFolderData

NUM_ROUNDS = 5
_BATCH_SIZE = 64
_NO_LIMIT = 1000  # GB
TORCHVISION = "torchvision"
Batches = Callable[[Path, int], Iterable[Any]]


class Run(NamedTuple):
    """What identifies a record."""

    round: int
    image_size: int


def torchvision_batches(root: Path, image_size: int) -> Iterable[Any]:
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(image_size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    return DataLoader(ImageFolder(str(root / "train"), transform), _BATCH_SIZE, shuffle=True)


def our_batches(root: Path, image_size: int) -> Iterable[Any]:
    data = ImageFolderData(
        str(root),
        batch_size=_BATCH_SIZE,
        val_fraction=0,
        num_workers=0,
        image_size=image_size,
        cache_limit_gb=_NO_LIMIT,
        min_crop=0.08,  # as torchvision's
        augmentations=None,
    )
    data.trainer = pl.Trainer(
        accelerator="cpu", max_epochs=5, logger=False, enable_checkpointing=False
    )
    data.trainer.state.fn = TrainerFn.FITTING
    data.setup("fit")
    return data.train_dataloader()


LOADERS: dict[str, Batches] = {
    TORCHVISION: torchvision_batches,
    "ours, first pass": our_batches,
    "ours, later pass": our_batches,
}


def rates(batches: Batches, root: Path, image_size: int) -> dict[str, float]:
    """Take one pass, from the folder to the last batch, and return its images per second."""
    began = time.perf_counter()
    spent = time.process_time()
    num_images = 0
    for batch in batches(root, image_size):
        num_images += len(batch["label"] if isinstance(batch, dict) else batch[1])
    return {
        "cpu": num_images / (time.process_time() - spent),
        "wall": num_images / (time.perf_counter() - began),
    }


def one_round(root: Path, image_size: int) -> dict[str, dict[str, float]]:
    """Return the rates of each loader."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FINETUNE_CACHE"] = folder
        return {name: rates(batches, root, image_size) for name, batches in LOADERS.items()}


@cache
def warm_up(root: Path, image_size: int) -> None:
    """Take a first round, which warms up the disk and the libraries."""
    one_round(root, image_size)


def measure(run: Run, root: Path) -> Record:
    """Return the rates of a round."""
    warm_up(root, run.image_size)
    return {"images_per_second": one_round(root, run.image_size)}


def table(records: Sequence[Record]) -> str:
    """Return medians, smallest and largest value, and the ratio to torchvision within each round."""
    rounds = [r["images_per_second"] for r in records]
    rows = []
    for name in LOADERS:
        ratios = [one[name]["cpu"] / one[TORCHVISION]["cpu"] for one in rounds]
        rows.append([name, spread([one[name]["cpu"] for one in rounds], 0), spread(ratios, 1)])
    return markdown(["loader", "images/s", "relative to torchvision"], rows)


BENCHMARK = Benchmark("loading", Run, table)


def main() -> None:
    parser = BENCHMARK.parser(__doc__)
    parser.add_argument("--root", type=Path, help="folder with train/CLASS/*")
    parser.add_argument("--image_size", type=int, default=224)
    args = parser.parse_args()
    if not args.document:
        if args.root is None:
            parser.error("--root is needed to measure")
        logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    runs = [Run(i, args.image_size) for i in range(NUM_ROUNDS)]
    BENCHMARK.main(args, runs, lambda run: measure(run, args.root))


if __name__ == "__main__":
    main()
