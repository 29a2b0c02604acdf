"""Measure how many labels `finetune review FOLDER --labels` needs, next to questions in a random order.

    python -m benchmarks.labels SET ... --backbone timm/NAME --weights TIMM_FOLDER [--seeds 5] [--size 128]

Each SET has train/CLASS and test/CLASS. The training images are answered in batches of five, with the labels of their
folders. After each batch a head on the frozen features is tested on the test images. Counted are the labels after which
it is at most 2 points below the head of all training images, for three batches in a row. A seed draws the random order.
"""

import argparse
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.driver import Benchmark
from benchmarks.common.records import Record
from benchmarks.common.tables import markdown, spread

RANDOM = "random order"
USEFUL = "questions of `review`"
POINTS = 0.02
IN_A_ROW = 3  # batches


class Run(NamedTuple):
    """What identifies a record."""

    start: str
    set: str
    what: str
    size: int
    seed: int


class Images(NamedTuple):
    """The features of a set, (N, D) and (T, D), and its labels, (N,) and (T,)."""

    train: NDArray[np.float32]
    train_y: NDArray[np.int64]
    test: NDArray[np.float32]
    test_y: NDArray[np.int64]


@cache
def images_of(folder: Path, backbone: str, weights: str, size: int) -> Images:
    from finetune.commands.check import label_network
    from finetune.features.image_features import image_features

    network = label_network(weights, backbone, size, None)
    assert network is not None
    names = sorted(path.name for path in (folder / "train").iterdir())
    found = []
    for split in ("train", "test"):
        paths = sorted((folder / split).glob("*/*"))
        found.append(
            np.stack([*image_features(network.features, [*map(str, paths)], network.preparation)])
        )
        found.append(np.array([names.index(path.parent.name) for path in paths]))
    return Images(*found)


def measure(run: Run, images: Images) -> Record:
    """Return the number of labels that a run needs, and the accuracy after each batch."""
    from finetune.review.questions import (
        BATCH,
        TYPICAL_PER_CLASS,
        learn,
        most_useful,
        typical_images,
    )

    num = len(images.train)
    num_classes = int(images.train_y.max()) + 1
    coordinates = np.concatenate([images.train, images.test]).astype(np.float64)
    centred = images.train - images.train.mean(axis=0)
    features = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    at_random = np.random.default_rng(run.seed).permutation(num)

    def accuracy(is_answered: NDArray[np.bool_]) -> tuple[float, NDArray[np.float64]]:
        labels = np.full(len(coordinates), -1)
        labels[:num][is_answered] = images.train_y[is_answered]
        probabilities, _ = learn(coordinates, labels, num_classes)
        is_right = probabilities[num:].argmax(axis=1) == images.test_y
        return float(is_right.mean()), probabilities[:num]

    of_all, _ = accuracy(np.ones(num, bool))
    is_answered = np.zeros(num, bool)
    typical = typical_images(features, TYPICAL_PER_CLASS * num_classes)
    first = typical if run.what == USEFUL else at_random
    asked = dict.fromkeys([at_random[0], *first.tolist()])
    is_answered[[*asked][:BATCH]] = True
    curve: list[float] = []
    num_good = 0  # batches in a row
    while True:
        result, probabilities = accuracy(is_answered)
        curve.append(result)
        num_good = num_good + 1 if result >= of_all - POINTS else 0
        if num_good == IN_A_ROW or is_answered.all():
            break
        open_images = at_random[~is_answered[at_random]]
        useful = most_useful(typical, probabilities) if run.what == USEFUL else open_images
        useful = useful[~is_answered[useful]]
        asked = dict.fromkeys([open_images[0], *useful.tolist()])
        is_answered[[*asked][:BATCH]] = True
    needed = min(BATCH * (len(curve) - num_good + 1), num)
    return {"labels": needed, "num_images": num, "accuracy_of_all": of_all, "curve": curve}


def table(records: Sequence[Record]) -> str:
    """Return the labels that each set needs."""
    rows = []
    for start, size, name in dict.fromkeys((r["start"], r["size"], r["set"]) for r in records):
        of_set = [r for r in records if (r["start"], r["size"], r["set"]) == (start, size, name)]
        row = [
            start,
            str(size),
            name,
            str(of_set[0]["num_images"]),
            f"{of_set[0]['accuracy_of_all']:.3f}",
        ]
        for what in (RANDOM, USEFUL):
            row.append(spread([r["labels"] for r in of_set if r["what"] == what], 0))
        rows.append([*row, str(len(of_set) // 2)])
    head = ["start", "size", "set", "images", "accuracy of all", RANDOM, USEFUL, "n"]
    return markdown(head, rows)


BENCHMARK = Benchmark("labels", Run, table)


def main() -> None:
    parser = BENCHMARK.parser(__doc__)
    parser.add_argument("sets", nargs="*", type=Path)
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--weights", default="DEFAULT")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=5)
    args: argparse.Namespace = parser.parse_args()
    folders = {folder.name: folder for folder in args.sets}
    runs = [
        Run(args.backbone, name, what, args.size, seed)
        for name in folders
        for what in (RANDOM, USEFUL)
        for seed in range(args.seeds)
    ]

    def of(run: Run) -> Record:
        return measure(run, images_of(folders[run.set], args.backbone, args.weights, run.size))

    BENCHMARK.main(args, runs, of)


if __name__ == "__main__":
    main()
