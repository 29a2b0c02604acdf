"""Train every shipped recipe with several seeds and write tables of the results into benchmarks/NOTEBOOK.md.

    pip install -e '.[dev]'
    python -m benchmarks.recipes --hotdog HOTDOG --fashion_mnist FASHION --weights resnet18.pt [--minutes 60]
    python -m benchmarks.recipes --paired A B --image_size N     # compares two recipes image by image

Each run is a command of its own, `finetune fit` or `plain.py`. The results go to recipes.json; a run whose config has
changed since is measured again. Stop at any time, and start again to continue; `--again` repeats the runs that failed.
"""

import csv
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.common.documents import ROOT, publish
from benchmarks.common.driver import Benchmark
from benchmarks.common.fashion import write_fashion_folder
from benchmarks.common.records import PROGRAM, load, where_and_when
from benchmarks.recipes.documents import table
from finetune.training.run_length import usual_epochs

PLAIN_SCRIPT = ROOT / "benchmarks/recipes/plain.py"
SEEDS = range(3)
SIZES = (128, 224)
NUM_PICTURES = 2000  # to train with, in each of the data sets
# A recipe with other options than its config: the config and the options.
VARIANTS = {
    "former_default": (
        "image_folder",
        "--model.head_init xavier --model.freeze_batch_norm false --model.optimizer SGD --model.optimizer.lr 0.03",
    ),
}
# The network's settings if a config states none: if these defaults change, it is another recipe.
DEFAULT_RECIPE = "fitted head, fixed batch norm, AdamW 1e-4, gradients clipped at 1, weights between start and end"
CONFIGS = ("hotdog", "image_folder", "former_default", "hotdog_probe", "hotdog_frozen")
CONFIGS += ("hotdog_book", "hotdog_scratch")
PLAIN = ("plain_one_rate", "plain_book", "plain_scratch")
_FIRST = ("hotdog", "hotdog_book", "plain_book")  # at 224 pixels
FASHION = ("hotdog", "image_folder", "former_default", "hotdog_book")


class Run(NamedTuple):
    """What identifies a record; `name` is a config's name, one of VARIANTS, or `plain_` and a recipe of plain.py."""

    name: str
    data: str
    image_size: int
    seed: int
    fingerprint: str


def plan(records: Sequence[dict]) -> Iterator[Run]:
    """Yield all runs. Each group goes through its recipes before the next seed: these are compared."""
    groups = [
        ("hotdog", 128, (*CONFIGS, *PLAIN)),
        ("hotdog", 224, _FIRST),
        ("fashion", 64, FASHION),
        ("hotdog", 224, [name for name in (*CONFIGS, *PLAIN) if name not in _FIRST]),
    ]
    for data, image_size, names in groups:
        for seed in SEEDS:
            yield from (Run(name, data, image_size, seed, fingerprint(name)) for name in names)


def fingerprint(name: str) -> str:
    """Return a digest that changes with the recipe; comments and format do not count."""
    if name.startswith("plain_"):
        code = PLAIN_SCRIPT.read_text("utf-8").split('"""', 2)[2]
        return digest(re.sub(r"#.*|[\s,()]", "", code))
    config, options = VARIANTS.get(name, (name, ""))
    settings = yaml.safe_load((ROOT / "configs" / f"{config}.yaml").read_text("utf-8"))
    has_length = "max_epochs" in settings.get("trainer", {})
    length = "" if has_length else str(usual_epochs(NUM_PICTURES))
    defaults = "" if "model" in settings or "xavier" in options else DEFAULT_RECIPE
    return digest(json.dumps(settings) + options + length + defaults)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def arguments(run: Run) -> list[str]:
    """Return the command's arguments without data and weights."""
    if run.name.startswith("plain_"):
        recipe = run.name.removeprefix("plain_")
        return f"--recipe {recipe} --image_size {run.image_size} --seed {run.seed}".split()
    config, options = VARIANTS.get(run.name, (run.name, ""))
    words = f"fit --config {config}.yaml --data.image_size {run.image_size} "
    words += f"--seed_everything {run.seed} {options} --test_after_fit true"
    return words.split()


def measure(run: Run, root: str, weights: str) -> dict:
    """Return the result of a run and its circumstances."""
    words = arguments(run)
    is_plain = run.name.startswith("plain_")
    with tempfile.TemporaryDirectory() as folder:
        # Each run begins without a cache.
        environment = {**os.environ, "FINETUNE_CACHE": f"{folder}/cache"}
        if is_plain:
            command = [sys.executable, str(PLAIN_SCRIPT), *words, "--root", root]
            command += ["--weights", weights]
        else:
            command = [PROGRAM, *words, "--data.root", root, "--trainer.default_root_dir", folder]
            command += [] if "scratch" in run.name else ["--model.weights", weights]
        started = time.perf_counter()
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env=environment
        )
        seconds = time.perf_counter() - started
        if is_plain:
            printed = json.loads(done.stdout.splitlines()[-1])
            result = {"accuracy": printed["accuracy"], "right": as_text(printed["right"])}
        else:
            result = result_of_fit(Path(folder), root)
    shown = ["python", "benchmarks/recipes/plain.py"] if is_plain else ["finetune"]
    return {
        **result,
        "seconds": round(seconds, 1),
        "command": shlex.join([*shown, *words]),
        **where_and_when(),
    }


def result_of_fit(folder: Path, root: str) -> dict:
    """Return the test's figures, the precision, and which test images are right."""
    run = folder / "fit/version_0"
    test = json.loads((run / "test.json").read_text("utf-8"))
    config = yaml.safe_load((run / "config.yaml").read_text("utf-8"))
    right = predicted_right(run / "checkpoints/best.ckpt", f"{root}/test", f"{folder}/rows.csv")
    return {
        **{n: round(test[f"test/{n}"], 5) for n in ("accuracy", "calibration_error", "loss")},
        "precision": config["trainer"]["precision"],
        "right": as_text(right),
    }


def predicted_right(checkpoint: Path, images: str, output: str) -> list[int]:
    """Return for each image of a folder of class folders whether a checkpoint is right, in the order of the paths."""
    options = ["--ckpt_path", str(checkpoint), "--data.predict", images, "--output", output]
    subprocess.run([PROGRAM, "predict", *options], stdout=subprocess.DEVNULL, check=True)
    with open(output, encoding="utf-8", newline="") as file:
        return [int(Path(row["path"]).parent.name == row["class"]) for row in csv.DictReader(file)]


def as_text(right: Sequence[int]) -> str:
    """Return four images a letter, in hexadecimal, padded with zeros."""
    bits = "".join(map(str, right))
    return "".join(f"{int(bits[i : i + 4].ljust(4, '0'), 2):x}" for i in range(0, len(bits), 4))


def paired(records: Sequence[dict], names: Sequence[str], data: str, image_size: int) -> str:
    """Return how two recipes differ on the same images: by McNemar's exact test."""
    from scipy.stats import binomtest

    rights = {
        (r["name"], r["seed"]): int(r["right"], 16)
        for r in records
        if (r["data"], r["image_size"]) == (data, image_size) and "right" in r
    }
    counts = {}
    for seed in SEEDS:
        if all((name, seed) in rights for name in names):
            a, b = (rights[name, seed] for name in names)
            counts[f"seed {seed}"] = ((a & ~b).bit_count(), (b & ~a).bit_count())
    if not counts:
        return f"no seed of both {names[0]} and {names[1]} at {image_size} pixels has its answers on record: run them"
    counts["all seeds"] = tuple(map(sum, zip(*counts.values(), strict=True)))
    return "\n".join(
        f"{what}: only {names[0]} right {a}, only {names[1]} right {b}, p = {binomtest(a, max(1, a + b)).pvalue:.3f}"
        for what, (a, b) in counts.items()
    )


def valid(records: Sequence[dict]) -> list[dict]:
    """Return the results of the recipes as they are now."""
    return [r for r in records if "failed" not in r and r["fingerprint"] == fingerprint(r["name"])]


def names_in(records: Sequence[dict]) -> list[str]:
    """Return the recipes that have results, in the order of the table."""
    return [name for name in (*CONFIGS, *PLAIN) if any(r["name"] == name for r in records)]


def tables(records: Sequence[dict]) -> dict[str, str]:
    """Return the Markdown tables of benchmarks/NOTEBOOK.md."""
    hotdog, fashion = ([r for r in records if r["data"] == data] for data in ("hotdog", "fashion"))
    return {
        "recipes": table("hotdog", hotdog, names_in(hotdog), SIZES),
        "fashion": table("fashion", fashion, FASHION, (64,)),
    }


def write(records: Sequence[dict]) -> None:
    """Write the tables."""
    publish(tables(valid(records)))


BENCHMARK = Benchmark(ROOT / "benchmarks/recipes/recipes.json", Run, plan, write, ("name",))


def main() -> None:
    parser = BENCHMARK.parser(__doc__)
    parser.add_argument("--hotdog", help="folder with train/CLASS and test/CLASS")
    parser.add_argument("--fashion_mnist", help="folder with FashionMNIST/raw/*.gz")
    parser.add_argument("--weights", help="state dict of ResNet-18 to start from")
    parser.add_argument("--image_size", type=int, help="only this size")
    parser.add_argument(
        "--untimed", action="store_true", help="record no seconds: the machine has other work"
    )
    parser.add_argument("--paired", nargs=2, metavar="NAME", help="only compare two recipes")
    args = parser.parse_args()
    if args.paired:
        records = valid(load(BENCHMARK.records))
        print(paired(records, args.paired, "hotdog", args.image_size or SIZES[0]))
        return
    with tempfile.TemporaryDirectory() as folder:
        roots = {"hotdog": args.hotdog, "fashion": args.fashion_mnist}

        def measured(run: Run) -> dict[str, Any]:
            root = roots[run.data]
            if run.data == "fashion":
                root = f"{folder}/fashion"
                if not Path(root).exists():
                    write_fashion_folder(roots["fashion"], Path(root))
            record = measure(run, root, args.weights)
            return {k: v for k, v in record.items() if k != "seconds" or not args.untimed}

        BENCHMARK.main(
            args,
            measured,
            lambda run: bool(roots[run.data]) and args.image_size in (None, run.image_size),
        )


if __name__ == "__main__":
    main()
