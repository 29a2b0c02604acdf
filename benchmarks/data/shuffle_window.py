"""Measure what a shuffle window costs in accuracy, on Fashion-MNIST.

    python -m benchmarks.data.shuffle_window --fashion FOLDER

6,000 training and 5,000 test images, packed: some 15 blocks of 1 MB. A small network is trained from random weights for
three epochs: with all images shuffled, and with a shuffle window of 500. A control has the images of each class in
blocks of their own, and a window of one image, so that nearly all images of a batch have the same class. Runs that are
compared have the same seed. The results go to benchmarks/data/shuffle_window.json and into benchmarks/NOTEBOOK.md. Stop
at any time, and start again to continue.
"""

import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

import finetune
from benchmarks.common.documents import ROOT, markdown, publish
from benchmarks.common.driver import Benchmark
from benchmarks.common.fashion import write_fashion_folder
from benchmarks.common.records import where_and_when
from finetune.commands.pack import pack
from finetune.data import datamodule
from finetune.data.samplers import ShuffleWindow

_ALL = "all images"
_WINDOWS = {_ALL: 0, "a window of 500": 500, "control: class by class": 1}
_SEEDS = {_ALL: 13, "a window of 500": 13, "control: class by class": 4}
_PER_BLOCK = 400  # images, of the control


class Run(NamedTuple):
    """What identifies a record."""

    order: str
    seed: int


def plan(records: Sequence[dict]) -> Iterator[Run]:
    for seed in range(max(_SEEDS.values())):
        orders = [order for order, num in _SEEDS.items() if seed < num]
        random.Random(seed).shuffle(orders)
        for order in orders:
            yield Run(order, seed)


def _class_by_class(paths: Sequence[str], size: int) -> ShuffleWindow:
    """Return a window whose blocks have images of about one class: paths are sorted by class."""
    return ShuffleWindow(np.arange(len(paths)) // _PER_BLOCK, size)


def measure(run: Run, packed: Path) -> dict:
    """Fit and test; return the accuracy."""
    options = {
        "data.shuffle_window": _WINDOWS[run.order],
        "data.crop_and_flip": False,
        "data.augmentations": None,
        "report": False,
    }
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if run.order.startswith("control"):
            stack.enter_context(patch.object(datamodule, "packed_window", _class_by_class))
        began = time.perf_counter()
        fitted = finetune.fit(
            packed,
            epochs=3,
            size=28,
            backbone="small_cnn",
            weights=None,
            workers=0,
            devices=1,
            precision="32-true",
            seed=run.seed,
            out=folder,
            options=options,
        )
        seconds = time.perf_counter() - began
    return {"accuracy": fitted.accuracy, "seconds": seconds, **where_and_when()}


def table(records: Sequence[dict]) -> str:
    """Return the mean accuracy of each order, and of the differences of the same seed, with standard errors."""
    accuracies = {
        order: {r["seed"]: 100 * r["accuracy"] for r in records if r["order"] == order}
        for order in _WINDOWS
    }
    rows = []
    for order, by_seed in accuracies.items():
        seeds = by_seed.keys() & accuracies[_ALL].keys()
        if len(seeds) < 2:
            continue
        differences = [by_seed[seed] - accuracies[_ALL][seed] for seed in seeds]
        error = statistics.stdev(differences) / len(seeds) ** 0.5
        difference = f"{statistics.fmean(differences):+.2f} ± {error:.2f}"
        mean = f"{statistics.fmean(by_seed[seed] for seed in seeds):.2f}"
        rows.append([order, mean, "–" if order == _ALL else difference, str(len(seeds))])
    return markdown(["shuffled", "test accuracy, %", "difference, points", "n"], rows)


def main() -> None:
    benchmark = Benchmark(
        ROOT / "benchmarks/data/shuffle_window.json",
        Run,
        plan,
        lambda records: publish({"shuffle_window": table(records)}),
        named=("order",),
    )
    parser = benchmark.parser(__doc__)
    parser.add_argument("--fashion", help="folder of torchvision's Fashion-MNIST")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["FINETUNE_CACHE"] = str(Path(temporary, "cache"))

        @cache
        def packed() -> Path:
            images = write_fashion_folder(args.fashion, Path(temporary, "images"), 600, 500)
            pack(str(images), str(Path(temporary, "packed")))
            return Path(temporary, "packed")

        benchmark.main(args, lambda run: measure(run, packed()))


if __name__ == "__main__":
    main()
