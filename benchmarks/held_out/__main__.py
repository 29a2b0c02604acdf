"""Compare recipes with the defaults on held-out training images. The test images are not used.

    pip install -e '.[dev]'
    python -m benchmarks.held_out SET ... --weights resnet18=resnet18.pt --size 96 --precision bf16-mixed
    python -m benchmarks.held_out SET ... --weights TIMM_FOLDER --only 'AdamW 3e-4' 'the defaults'
    python -m benchmarks.held_out --document

Each SET has train/CLASS. 30 % of the images of each class are held out. `finetune fit` gets the others, holds out its
own validation images from them, and tests on the held-out ones. The seed divides the images and trains. The results go
to held_out.json and into benchmarks/NOTEBOOK.md. Stop at any time, and start again to continue.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.documents import markdown, publish
from benchmarks.common.driver import Benchmark
from benchmarks.common.records import where_and_when
from benchmarks.defaults.__main__ import candidates, regression
from finetune.models.candidates import Candidate

RECORDS = Path(__file__).with_name("held_out.json")
SHARE = 0.3  # of the images of each class
BASE = "the defaults"
REGRESSION = "logistic regression"
CO_TUNING = "Co-Tuning"
FORMER = [
    "--model.head_init=xavier",
    "--model.freeze_batch_norm=false",
    "--optimizer=SGD",
    "--lr=0.03",
]
FITTED_HEAD = FORMER[1:]  # and the head that the defaults begin with
# The options of each recipe.
RECIPES = {
    REGRESSION: None,
    BASE: [],
    "AdamW 3e-4": ["--lr=3e-4"],
    "AdamW 1e-3": ["--lr=1e-3"],
    "label smoothing 0.1": ["--model.label_smoothing=0.1"],
    "layer decay 0.8": ["--model.layer_decay=0.8"],
    "batches of 16": ["--batch=16"],
    "two members": ["--members=2"],
    CO_TUNING: [],
    "the former defaults": FORMER,
    "the former defaults from the fitted head": FITTED_HEAD,
}


class Run(NamedTuple):
    """What identifies a record; `recipe` is a key of RECIPES."""

    start: str
    set: str
    recipe: str
    seed: int
    size: int
    precision: str


def divide(folder: Path, seed: int, target: Path) -> None:
    """Link the training images of a set into target/train and target/test, which gets `SHARE` of each class."""
    rng = random.Random(f"{folder.name}{seed}")
    for images_of_class in sorted((folder / "train").iterdir()):
        images = sorted(images_of_class.iterdir())
        rng.shuffle(images)
        num_held_out = round(SHARE * len(images))
        parts = {"test": images[:num_held_out], "train": images[num_held_out:]}
        for part, members in parts.items():
            links = target / part / images_of_class.name
            links.mkdir(parents=True)
            for image in members:
                (links / image.name).symlink_to(image.resolve())


def fit(candidate: Candidate, folder: Path, run: Run, options: Sequence[str]) -> dict:
    """Return the accuracy of a fit on the test images of a folder."""
    with tempfile.TemporaryDirectory() as out:
        program = "benchmarks.held_out.co_tuning" if run.recipe == CO_TUNING else "finetune"
        command = [sys.executable, "-m", program, "fit", str(folder)]
        command += ["--backbone", candidate.backbone, "--weights", candidate.weights]
        command += ["--size", str(run.size), "--seed", str(run.seed), "--precision", run.precision]
        command += ["--report", "false", "--out", out, *options]
        began = time.monotonic()
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        seconds = round(time.monotonic() - began)
        result = json.loads(Path(out, "fit/version_0/test.json").read_text("utf-8"))
    return {
        "seconds": seconds,
        "accuracy": result["test/accuracy"],
        "error_before": result["test/calibration_error_before_scaling"],
    }


def tables(records: Sequence[dict]) -> dict[str, str]:
    """Return the Markdown table of benchmarks/NOTEBOOK.md: each recipe next to the defaults of the same runs."""
    good = [r for r in records if "accuracy" in r]
    rows = []
    for start in dict.fromkeys(r["start"] for r in good):
        for recipe in RECIPES:
            accuracies = _accuracies(good, start, recipe)
            base = _accuracies(good, start, BASE)
            pairs = [(accuracies[key], base[key]) for key in accuracies if key in base]
            if recipe != BASE and pairs:
                rows.append([start, recipe, *_cells(pairs)])
    head = ["start", "recipe", "pairs", "accuracy", "accuracy of the defaults", "difference"]
    return {"held_out": markdown(head, rows)}


def _accuracies(records: Sequence[dict], start: str, recipe: str) -> dict[tuple, float]:
    """Return the accuracy of each run of a recipe, by what a pair has in common."""
    return {
        (r["set"], r["seed"], r["size"], r["precision"]): r["accuracy"]
        for r in records
        if (r["start"], r["recipe"]) == (start, recipe)
    }


def _cells(pairs: Sequence[tuple[float, float]]) -> list[str]:
    """Return the number of pairs, both means, and the mean difference ± its standard error."""
    differences = [accuracy - base for accuracy, base in pairs]
    difference = f"{statistics.fmean(differences):+.3f}"
    if len(pairs) > 1:
        difference += f" ± {statistics.stdev(differences) / len(pairs) ** 0.5:.3f}"
    means = [f"{statistics.fmean(column):.3f}" for column in zip(*pairs, strict=True)]
    return [str(len(pairs)), *means, difference]


def main() -> None:
    runs: dict[Run, tuple[Candidate, Path]] = {}
    benchmark = Benchmark(
        RECORDS, Run, lambda records: runs, lambda records: publish(tables(records)), ("recipe",)
    )
    parser = benchmark.parser(__doc__)
    parser.add_argument("sets", nargs="*", type=Path)
    parser.add_argument("--weights", help="networks with their weights, separated by commas")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    for candidate in [] if args.document else candidates(args.weights):
        for seed in range(args.seeds):
            for folder in args.sets:
                for recipe in RECIPES:
                    run = Run(
                        candidate.backbone, folder.name, recipe, seed, args.size, args.precision
                    )
                    runs[run] = (candidate, folder)

    def measure(run: Run) -> dict:
        candidate, folder = runs[run]
        options = RECIPES[run.recipe]
        with tempfile.TemporaryDirectory() as parts:
            divide(folder, run.seed, Path(parts))
            if options is None:
                result = regression(candidate, Path(parts), run.size)
            else:
                result = fit(candidate, Path(parts), run, options)
        return {**result, **where_and_when()}

    benchmark.main(args, measure)


if __name__ == "__main__":
    main()
