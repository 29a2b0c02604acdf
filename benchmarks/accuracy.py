"""Measure the accuracy of `finetune fit` with its defaults, next to a logistic regression and to other recipes.

    python -m benchmarks.accuracy SET ... --weights TIMM_FOLDER [--seeds 3] [--size 128]
    python -m benchmarks.accuracy SET ... --weights TIMM_FOLDER --held_out --ways fit 'AdamW 3e-4' 'mixup 0.2'
    python -m benchmarks.accuracy SET ... --weights TIMM_FOLDER --held_out --compare

Each SET has train/CLASS and test/CLASS. The regression is scikit-learn's, on the features of the frozen network. Other
recipes are compared on 30 % of the training images (`--held_out`), so that a choice does not see the test images;
`--compare` prints the paired differences to `fit`. `--mosaics SET` adds a multi-label set, drawn for each seed.
"""

import argparse
import csv
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.common.driver import Benchmark
from benchmarks.common.records import Record
from benchmarks.common.tables import markdown, mean_and_spread
from benchmarks.mosaics import write_mosaics
from finetune.models.timm_networks import backbone_of

# network, size, precision and part of the table
SHOWN = ("timm/tf_efficientnet_lite0", 128, "32-true", "test")
STRENGTH = 0.1  # scikit-learn's C
HELD_OUT = 0.3  # of the images of each class
REGRESSION = "logistic regression"
RAW = "logistic regression, raw features"
FIT = "`finetune fit FOLDER`"
RANDOM_HEAD = ["--model.head_init=xavier", "--model.freeze_batch_norm=false", "--optimizer=SGD"]
# The options of each recipe.
RECIPES: dict[str, list[str]] = {
    FIT: [],
    "AdamW 3e-4": ["--lr=3e-4"],
    "AdamW 1e-3": ["--lr=1e-3"],
    "SGD from a random head": [*RANDOM_HEAD, "--lr=0.03"],
    "label smoothing 0.1": ["--model.label_smoothing=0.1"],
    "batches of 16": ["--batch=16"],
    "mixup 0.2": ["--data.mixup=0.2"],
    "cutmix 1": ["--data.cutmix=1"],
    "TrivialAugment": ["--data.augmentations=[{class_path: TrivialAugment}]"],
    "frozen backbone": ["--freeze=backbone"],
    "two members": ["--members=2"],
    "hotdog.yaml": ["--config=hotdog.yaml"],
    "hotdog_book.yaml": ["--config=hotdog_book.yaml"],
}
WAYS = (REGRESSION, RAW, *RECIPES)
MOSAICS = "mosaics"

# Shapes: N images, D features, K labels.


class Run(NamedTuple):
    """What identifies a record; `start` is a network of timm, `what` one of WAYS, `part` is `test` or `held out`."""

    start: str
    set: str
    what: str
    part: str
    seed: int
    size: int
    precision: str


@contextmanager
def images_of(run: Run, folder: Path) -> Iterator[Path]:
    """Yield the folder or table of a run: the set, mosaics of it, or its training images divided in two."""
    with tempfile.TemporaryDirectory() as place:
        if run.set == MOSAICS:
            yield write_mosaics(folder, Path(place), run.seed)
        elif run.part == "test":
            yield folder
        else:
            divide(folder, run.seed, Path(place))
            yield Path(place)


def divide(folder: Path, seed: int, target: Path) -> None:
    """Link the training images of a set into target/train and target/test, which gets `HELD_OUT` of each class."""
    rng = random.Random(f"{folder.name}{seed}")
    for images_of_class in sorted((folder / "train").iterdir()):
        images = sorted(images_of_class.iterdir())
        rng.shuffle(images)
        num_held_out = round(HELD_OUT * len(images))
        parts = {"test": images[:num_held_out], "train": images[num_held_out:]}
        for part, members in parts.items():
            links = target / part / images_of_class.name
            links.mkdir(parents=True)
            for image in members:
                (links / image.name).symlink_to(image.resolve())


def fit(weights: Path, images: Path, run: Run, options: Sequence[str], out: str) -> Record:
    """Return the result of `finetune fit` by its own test."""
    command = [sys.executable, "-m", "finetune", "fit", str(images), *options]
    command += ["--backbone", run.start, "--weights", str(weights)]
    command += ["--size", str(run.size), "--seed", str(run.seed), "--precision", run.precision]
    began = time.monotonic()
    subprocess.run(
        [*command, "--report", "false", "--out", out],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    seconds = round(time.monotonic() - began)
    test = json.loads(Path(out, "fit/version_0/test.json").read_text("utf-8"))
    metric = "test/mAP" if run.set == MOSAICS else "test/accuracy"
    return {
        "seconds": seconds,
        "accuracy": test[metric],
        "calibration_error": test.get("test/calibration_error"),
        "error_before": test.get("test/calibration_error_before_scaling"),
    }


def regression(weights: Path, images: Path, run: Run) -> Record:
    """Return the accuracy (multi-label: mAP) of scikit-learn's regression on the frozen network's features."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import average_precision_score
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer, StandardScaler

    import finetune

    with tempfile.TemporaryDirectory() as out:
        frozen = ["--freeze", "backbone", "--model.head_stages", "1"]
        fit(weights, images, run, frozen, out)
        model = finetune.load(f"{out}/fit/version_0")
    train, train_y = labelled(images, "train")
    test, test_y = labelled(images, "test")
    head = LogisticRegression(C=STRENGTH, max_iter=2000)
    heads = OneVsRestClassifier(head) if train_y.ndim == 2 else head
    scale = StandardScaler() if run.what == REGRESSION else FunctionTransformer()
    pipeline = make_pipeline(scale, heads)
    pipeline.fit(model.embed(train), train_y)
    if train_y.ndim == 2:
        probabilities = pipeline.predict_proba(model.embed(test))
        return {"accuracy": float(average_precision_score(test_y, probabilities))}
    return {"accuracy": float((pipeline.predict(model.embed(test)) == test_y).mean())}


def labelled(images: Path, split: str) -> tuple[list[str], np.ndarray]:
    """Return the paths of a split with their classes (N,), or of a table with their labels (N, K) bool."""
    if images.is_dir():
        paths = sorted((images / split).glob("*/*"))
        return [str(path) for path in paths], np.array([path.parent.name for path in paths])
    with open(images, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    names = sorted({name for row in rows for name in row["labels"].split(";")})
    chosen = [row for row in rows if row["split"] == split]
    labels = [[name in row["labels"].split(";") for name in names] for row in chosen]
    return [str(images.parent / row["path"]) for row in chosen], np.array(labels)


def measure(run: Run, weights: Path, folder: Path) -> Record:
    """Return the result of a run."""
    with images_of(run, folder) as images, tempfile.TemporaryDirectory() as out:
        if run.what in RECIPES:
            return fit(weights, images, run, RECIPES[run.what], out)
        return regression(weights, images, run)


def table(records: Sequence[Record]) -> str:
    """Return the accuracy of the regressions and of a fit on the test images of each set."""
    shown = [r for r in records if (r["start"], r["size"], r["precision"], r["part"]) == SHOWN]
    sets = list(dict.fromkeys(r["set"] for r in shown if r["what"] == FIT))
    rows = []
    for what in (REGRESSION, RAW, FIT):
        found = [r for r in shown if r["what"] == what]
        if found:
            rows.append([what, *cells(found, sets)])
    heads = ["mosaics, mAP" if name == MOSAICS else name for name in sets]
    return markdown(["test accuracy", *heads, "mean", "calibration error"], rows)


def cells(records: Sequence[Record], sets: Sequence[str]) -> list[str]:
    """Return the accuracy on each set, their mean if all are measured, and the calibration error of a fit."""
    by_set = {name: [r["accuracy"] for r in records if r["set"] == name] for name in sets}
    means = [
        statistics.fmean(values) for name, values in by_set.items() if values and name != MOSAICS
    ]
    is_complete = len(means) == len(sets) - (MOSAICS in sets)
    shown = [
        f"{values[0]:.3f}" if len(values) == 1 else mean_and_spread(values, 3)
        for values in by_set.values()
    ]
    errors = [r["calibration_error"] for r in records if r.get("calibration_error") is not None]
    error = f"{statistics.fmean(errors):.3f}" if errors else "–"
    return [*shown, f"{statistics.fmean(means):.3f}" if is_complete else "–", error]


def differences(records: Sequence[Record], part: str) -> str:
    """Return the mean difference of each way to `finetune fit` in the same runs, ± its standard error."""
    rows = []
    of_part = {BENCHMARK.key(r): r["accuracy"] for r in records if r["part"] == part}
    for start, what in dict.fromkeys((run.start, run.what) for run in of_part):
        runs = [run for run in of_part if (run.start, run.what) == (start, what) and what != FIT]
        bases = [run._replace(what=FIT) for run in runs]
        pairs = [(run, base) for run, base in zip(runs, bases, strict=True) if base in of_part]
        values = [of_part[run] - of_part[base] for run, base in pairs]
        if len(values) > 1:
            error = statistics.stdev(values) / len(values) ** 0.5
            mean = f"{statistics.fmean(values):+.3f} ± {error:.3f}"
            rows.append([start, what, str(len(values)), mean])
    return markdown(["network", "recipe", "pairs", "difference"], rows)


BENCHMARK = Benchmark("accuracy", Run, table)


def runs_of(args: argparse.Namespace) -> dict[Run, Path]:
    """Return all runs of a command with their folders, in their order."""
    part = "held out" if args.held_out else "test"
    folders = {folder.name: folder for folder in args.sets}
    if args.mosaics:
        folders[MOSAICS] = args.mosaics
    backbone = backbone_of(str(args.weights)) if args.weights else ""
    runs = {}
    for what in args.ways:
        for name, folder in folders.items():
            # the regression has no seed, except that of the held-out images and of the mosaics
            is_drawn = what in RECIPES or args.held_out or name == MOSAICS
            for seed in range(args.seeds if is_drawn else 1):
                run = Run(backbone, name, what, part, seed, args.size, args.precision)
                runs[run] = folder
    return runs


def main() -> None:
    parser = BENCHMARK.parser(__doc__)
    parser.add_argument("sets", nargs="*", type=Path)
    parser.add_argument("--mosaics", type=Path, metavar="SET")
    parser.add_argument("--weights", type=Path, help="folder of a network of timm")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=[REGRESSION, RAW, FIT])
    parser.add_argument("--held_out", action="store_true")
    parser.add_argument("--compare", action="store_true", help="only print paired differences")
    parser.add_argument("--size", type=int, default=SHOWN[1])
    parser.add_argument("--precision", default=SHOWN[2])
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    if args.compare:
        print(differences(BENCHMARK.newest(), "held out" if args.held_out else "test"))
        return
    if args.sets and not args.weights:
        parser.error("--weights is needed to measure")
    runs = runs_of(args)
    BENCHMARK.main(args, runs, lambda run: measure(run, args.weights, runs[run]))


if __name__ == "__main__":
    main()
