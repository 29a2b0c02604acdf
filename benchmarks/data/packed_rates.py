"""Measure an epoch of small images, in a folder and packed, on the disk and in object storage.

    python -m benchmarks.data.packed_rates

Two sets of drawn JPEG files; 9 of 10 files are read: 6,000 of about 3 kB, 64x64 pixels, in 10 classes; and the 999
of about 100 kB of `storage_rates`. A server in another process holds them in memory, as files and packed, and waits
before each answer. Each round takes its cases in a random order. An epoch of training images is read through the data
module, at 28 pixels, without augmentation and network, in batches of 32, decoded by one worker; packed images also in a
shuffle window. The seconds include the start of the worker, but not the search for the images. The results go to
benchmarks/data/packed_rates.json and into benchmarks/NOTEBOOK.md. Stop at any time, and start again to continue.
"""

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import cv2
import numpy as np

from benchmarks.common.documents import ROOT, markdown, publish, spread
from benchmarks.common.driver import Benchmark
from benchmarks.common.records import where_and_when
from benchmarks.data import storage_rates
from benchmarks.data.storage_rates import Server, measure_on_server
from finetune import ImageFolderData
from finetune.commands.pack import pack

_NUM_CLASSES = 10
_PER_CLASS = 600
_FOLDER = "folder"
_PACKED = "packed"
_WINDOW = "packed, window"
_CASES = (_FOLDER, _PACKED, _WINDOW)


def draw_small(root: Path) -> None:
    """Write small JPEG files in class folders."""
    rng = np.random.default_rng(0)
    for k in range(_NUM_CLASSES):
        folder = root / "train" / f"class{k}"
        folder.mkdir(parents=True)
        for i in range(_PER_CLASS):
            coarse = rng.integers(0, 256, (16, 16, 3)).astype(np.uint8)
            image = cv2.resize(coarse, (64, 64), interpolation=cv2.INTER_CUBIC)
            noisy = (image + rng.integers(-14, 14, image.shape)).clip(0, 255).astype(np.uint8)
            cv2.imwrite(str(folder / f"{i:03d}.jpg"), noisy, [cv2.IMWRITE_JPEG_QUALITY, 85])


class Images(NamedTuple):
    """A set of images, and how it is measured.

    Attributes:
        draw: Draws them in a folder.
        window: Images of the shuffle window.
        latencies: In milliseconds; -1 is the disk.
        num_rounds: Number of rounds.
    """

    draw: Callable[[Path], None]
    window: int
    latencies: tuple[int, ...]
    num_rounds: int


_SETS = {
    "3kB": Images(draw_small, 1000, (-1, 0, 20, 100), 5),
    "100kB": Images(storage_rates.draw_images, 200, (-1, 20), 3),
}


class Run(NamedTuple):
    """What identifies a record. A latency of -1 is the disk."""

    images: str
    case: str
    latency: int
    round: int


def plan(records: Sequence[dict]) -> Iterator[Run]:
    for number in range(max(one.num_rounds for one in _SETS.values())):
        cases = [
            (images, case, latency)
            for images, one in _SETS.items()
            if number < one.num_rounds
            for case in _CASES
            for latency in one.latencies
        ]
        random.Random(number).shuffle(cases)
        for images, case, latency in cases:
            yield Run(images, case, latency, number)


def draw(root: Path) -> None:
    """Draw all sets, and pack them."""
    for name, one in _SETS.items():
        one.draw(root / name / _FOLDER)
        pack(str(root / name / _FOLDER), str(root / name / _PACKED))


def measure(run: Run, root: Path, server: Server) -> dict:
    """Read an epoch; return its seconds, and the requests and bytes that it took."""
    os.environ |= server.environment
    folder = f"{run.images}/{_FOLDER if run.case == _FOLDER else _PACKED}"
    place = f"s3://photos/set/{folder}" if run.latency >= 0 else str(root / folder)
    data = ImageFolderData(
        place,
        image_size=28,
        crop_and_flip=False,
        augmentations=None,
        num_workers=1,
        shuffle_window=_SETS[run.images].window if run.case == _WINDOW else 0,
    )
    data.read()
    server.set_latency(max(0, run.latency))
    began = time.perf_counter()
    began_cpu = time.process_time()
    num_images = sum(len(batch["index"]) for batch in data.loader("train", train=True))
    seconds = time.perf_counter() - began
    cpu_seconds = time.process_time() - began_cpu
    num_requests, num_bytes = server.set_latency(0)
    data.teardown("fit")
    assert num_images == len(data.splits["train"])
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "num_images": num_images,
        "num_requests": num_requests,
        "megabytes": num_bytes / 1e6,
        **where_and_when(),
    }


def table(records: Sequence[dict]) -> str:
    """Return the rates, also relative to those of the folder on the disk in the same round, and the requests."""
    on_disk = {
        (r["images"], r["round"]): r["seconds"]
        for r in records
        if (r["case"], r["latency"]) == (_FOLDER, -1)
    }
    rows = []
    for name, one in _SETS.items():
        for latency, case in ((latency, case) for latency in one.latencies for case in _CASES):
            found = [
                r
                for r in records
                if (r["images"], r["case"], r["latency"]) == (name, case, latency)
                and (name, r["round"]) in on_disk
            ]
            if found:
                place = "disk" if latency < 0 else f"{latency} ms"
                shown = f"{case} of {one.window:,}" if case == _WINDOW else case
                relative = [on_disk[name, r["round"]] / r["seconds"] for r in found]
                rates = spread([r["num_images"] / r["seconds"] for r in found], 0)
                cells = [name, place, shown, rates, spread(relative, 2), *_reads(latency, found)]
                rows.append([*cells, str(len(found))])
    head = ["image", "latency", "read as", "images/s", "relative to the folder on the disk"]
    return markdown([*head, "requests", "MB", "CPU seconds of the main process", "n"], rows)


def _reads(latency: int, found: Sequence[dict]) -> list[str]:
    """Return the cells of requests and megabytes, which the disk has none of, and of CPU seconds."""
    cells = ["–", "–"]
    if latency >= 0:
        requests = f"{median(r['num_requests'] for r in found):,.0f}"
        cells = [requests, f"{median(r['megabytes'] for r in found):,.0f}"]
    return [*cells, spread([r["cpu_seconds"] for r in found], 1)]


def main() -> None:
    benchmark = Benchmark(
        ROOT / "benchmarks/data/packed_rates.json",
        Run,
        plan,
        lambda records: publish({"packed_rates": table(records)}),
        named=("images", "case"),
    )
    measure_on_server(benchmark, measure, __doc__, draw)


if __name__ == "__main__":
    main()
