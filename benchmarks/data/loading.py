"""From picture files to batches on one core: torchvision's road beside ours, with and without the cache.

    python -m benchmarks.data.loading --root data/hotdog [--repeats 5]

One process on one core, libraries with one thread, batches of 64, `num_workers` 0. torchvision: ImageFolder,
RandomResizedCrop, flip, ToTensor, Normalize, DataLoader. Ours: ImageFolderData with its defaults; that means uint8, for
normalisation is the network's part. Each repeat takes the roads in turn (A B C D A B C D …), every picture of
root/train once for each. `first pass` decodes all pictures, writes the cache and brings it to the disk, then trains an
epoch from it; `later pass` is an epoch after it. Rates are per second of the core's time, which other programs on the
machine hardly change; those by the clock are recorded too. The results go to benchmarks/data/loading.json and into
benchmarks/NOTEBOOK.md.
"""

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "NO_ALBUMENTATIONS_UPDATE": "1"}

import pytorch_lightning as pl
import simplejpeg
import torch
from pytorch_lightning.trainer.states import TrainerFn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from benchmarks.common.documents import ROOT, markdown, publish, spread
from benchmarks.common.driver import command_line
from finetune import ImageFolderData
from finetune.system.machine import processor

RECORDS = ROOT / "benchmarks/data/loading.json"
_BATCH = 64
Road = Callable[[], Iterable[Any]]


def torchvision_road(root: Path, image_size: int) -> Road:
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(image_size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    return lambda: DataLoader(ImageFolder(str(root / "train"), transform), _BATCH, shuffle=True)


def decoder_road(root: Path) -> Road:
    """Read and decode each picture, one by one and no more: what no road can do without."""
    return lambda: (
        (simplejpeg.decode_jpeg(path.read_bytes()), [path]) for path in root.glob("train/*/*")
    )


def our_road(root: Path, image_size: int, cache_size: int | None, limit_gb: float) -> Road:
    def batches() -> DataLoader:
        options: dict[str, Any] = {
            "cache_size": cache_size,
            "cache_limit_gb": limit_gb,
            "image_size": image_size,
        }
        options |= {"min_crop": 0.08, "augmentations": None}  # as torchvision's road
        data = ImageFolderData(
            str(root), batch_size=_BATCH, val_fraction=0, num_workers=0, **options
        )
        data.trainer = pl.Trainer(
            accelerator="cpu", max_epochs=5, logger=False, enable_checkpointing=False
        )
        data.trainer.state.fn = TrainerFn.FITTING
        data.setup("fit")
        return data.train_dataloader()

    return batches


def measure(road: Road) -> dict[str, float]:
    """Take one pass, from the folder to the last batch, and return its pictures per second."""
    wall = time.perf_counter()
    cpu = time.process_time()
    num = 0
    for batch in road():
        num += len(batch["label"] if isinstance(batch, dict) else batch[1])
    return {
        "cpu": num / (time.process_time() - cpu),
        "wall": num / (time.perf_counter() - wall),
        "pictures": num,
    }


def compare(
    root: Path, image_size: int, cache_size: int | None, repeats: int
) -> dict[str, list[dict[str, float]]]:
    """Return what `measure` gave for each road and repeat."""
    kept = our_road(root, image_size, cache_size, limit_gb=1000)
    roads = {
        "torchvision": torchvision_road(root, image_size),
        "libjpeg-turbo, nothing else": decoder_road(root),
        "ours, no cache": our_road(root, image_size, cache_size, limit_gb=0),
        "ours, first pass": kept,
        "ours, later pass": kept,
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in roads}
    for repeat in range(repeats + 1):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["FINETUNE_CACHE"] = folder
            for name, road in roads.items():
                result = measure(road)
                if repeat:  # the first warms up the disk and the libraries
                    found[name].append(result)
                    print(f"{repeat} {name:28} {result['cpu']:6.0f}", flush=True)
    return found


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Return medians, smallest and largest value, and the ratio to torchvision within each repeat."""
    rows = []
    for name, results in found.items():
        ratios = [
            ours["cpu"] / theirs["cpu"]
            for ours, theirs in zip(results, found["torchvision"], strict=True)
        ]
        cells = [spread([r[clock] for r in results], 0) for clock in ("cpu", "wall")]
        rows.append([name, *cells, spread(ratios, 2)])
    return markdown(["loader", "images/s, CPU time", "wall clock", "relative to torchvision"], rows)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder with train/CLASS/*")
    parser.add_argument("--image_size", type=int, default=224)
    parser.add_argument(
        "--cache_size", type=int, help="shorter side of the cached pictures; by default as they are"
    )
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    found = compare(args.root, args.image_size, args.cache_size, args.repeats)
    settings = {"image_size": args.image_size, "cache_size": args.cache_size, "batch_size": _BATCH}
    about = {"processor": processor(), "torch": torch.__version__, **settings}
    RECORDS.write_text(
        json.dumps({"about": about, "pictures_per_second": found}, indent=1) + "\n", "utf-8"
    )
    publish({"data_road": table(found)})
    print(table(found))


if __name__ == "__main__":
    main()
