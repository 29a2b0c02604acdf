"""Train every shipped recipe with several seeds and write table and chart of the results into docs/benchmarks.md.

    pip install -e '.[dev]'
    python -m benchmarks.recipes --hotdog HOTDOG --fashion_mnist FASHION --weights resnet18.pt [--minutes 60]

Each run is a command of its own, `finetune fit` or `plain.py`. Its result is added to recipes.json beside this as soon
as it is there, and is not run again unless its config changes: stop at any time, start again to go on.
`--document` only writes the documents from what is recorded. `--paired A B --image_size N` holds two recipes against
each other, picture by picture, seed by seed.
"""

import argparse
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.common.documents import ROOT, fill
from benchmarks.common.fashion import write_fashion_folder
from benchmarks.common.records import load, save, where_and_when
from benchmarks.recipes.documents import draw, table
from finetune.training.run_length import usual_epochs

RECORDS = ROOT / "benchmarks/recipes/recipes.json"
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
# What the settings of a config that states none for the network are: a change of these defaults is another recipe.
DEFAULT_RECIPE = "fitted head, fixed batch norm, AdamW 1e-4, gradients clipped at 1, weights between start and end"


@dataclass(frozen=True)
class Recipe:
    """What is run on which data: a config's name, one of VARIANTS, or for `plain_…` a recipe of plain.py."""

    name: str
    data: str
    image_size: int

    def arguments(self, seed: int) -> list[str]:
        """Return the command's arguments after the data and the weights."""
        if self.name.startswith("plain_"):
            return f"--recipe {self.name.removeprefix('plain_')} --image_size {self.image_size} --seed {seed}".split()
        config, options = VARIANTS.get(self.name, (self.name, ""))
        return (
            f"fit --config {config}.yaml --data.image_size {self.image_size} --seed_everything {seed} {options} "
            "--test_after_fit true"
        ).split()

    def fingerprint(self) -> str:
        """Return what changes when the recipe does: comments and format do not count."""
        if self.name.startswith("plain_"):
            code = (ROOT / "benchmarks/recipes/plain.py").read_text("utf-8").split('"""', 2)[2]
            text = re.sub(r"#.*|[\s,()]", "", code)
        else:
            config, options = VARIANTS.get(self.name, (self.name, ""))
            settings = yaml.safe_load((ROOT / "configs" / f"{config}.yaml").read_text("utf-8"))
            length = (
                ""
                if "max_epochs" in settings.get("trainer", {})
                else str(usual_epochs(NUM_PICTURES))
            )
            defaults = "" if "model" in settings or "xavier" in options else DEFAULT_RECIPE
            text = json.dumps(settings) + options + length + defaults
        return hashlib.sha256(text.encode()).hexdigest()[:12]


CONFIGS = (
    *("hotdog", "image_folder", "former_default", "hotdog_probe"),
    *("hotdog_frozen", "hotdog_book", "hotdog_scratch"),
)
PLAIN = ("plain_one_rate", "plain_book", "plain_scratch")
# Each group goes through all its recipes before the next seed: what is measured side by side is compared.
GROUPS = (
    [Recipe(name, "hotdog", 128) for name in (*CONFIGS, *PLAIN)],
    [Recipe(name, "hotdog", 224) for name in ("hotdog", "hotdog_book", "plain_book")],
    [
        Recipe(name, "fashion", 64)
        for name in ("hotdog", "image_folder", "former_default", "hotdog_book")
    ],
    [
        Recipe(name, "hotdog", 224)
        for name in (*CONFIGS, *PLAIN)
        if name not in ("hotdog", "hotdog_book", "plain_book")
    ],
)


def key(record: dict) -> tuple:
    """Return what of a run there is one record."""
    return record["name"], record["data"], record["image_size"], record["seed"]


def is_recorded(records: list[dict], recipe: Recipe, seed: int) -> bool:
    wanted = (recipe.name, recipe.data, recipe.image_size, seed)
    return any(key(r) == wanted and r["fingerprint"] == recipe.fingerprint() for r in records)


def measure(recipe: Recipe, seed: int, root: str, weights: str) -> dict:
    """Run a recipe once and return its record."""
    arguments = recipe.arguments(seed)
    with tempfile.TemporaryDirectory() as folder:
        if recipe.name.startswith("plain_"):
            program = [sys.executable, str(ROOT / "benchmarks/recipes/plain.py")]
            shown = ["python", "benchmarks/recipes/plain.py", *arguments]
            places = ["--root", root, "--weights", weights]
        else:
            program = [str(Path(sys.executable).with_name("finetune"))]
            shown = ["finetune", *arguments]
            places = ["--data.root", root, "--trainer.default_root_dir", folder]
            if "scratch" not in recipe.name:
                places += ["--model.weights", weights]
        # each run begins without one
        environment = {**os.environ, "FINETUNE_CACHE": f"{folder}/cache"}
        started = time.perf_counter()
        done = subprocess.run(
            [*program, *arguments, *places],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=environment,
        )
        seconds = time.perf_counter() - started
        if recipe.name.startswith("plain_"):
            printed = json.loads(done.stdout.splitlines()[-1])
            result, right = {"accuracy": printed["accuracy"]}, printed["right"]
        else:
            run = next(Path(folder).glob("fit/version_0"))
            test = json.loads((run / "test.json").read_text("utf-8"))
            result = {
                name: round(test[f"test/{name}"], 5)
                for name in ("accuracy", "calibration_error", "loss")
            }
            result["precision"] = yaml.safe_load((run / "config.yaml").read_text("utf-8"))[
                "trainer"
            ]["precision"]
            right = predicted_right(
                program[0], run / "checkpoints/best.ckpt", f"{root}/test", f"{folder}/rows.csv"
            )
    return {
        "name": recipe.name,
        "data": recipe.data,
        "image_size": recipe.image_size,
        "seed": seed,
        **result,
        "right": as_text(right),
        "seconds": round(seconds, 1),
        "command": shlex.join(shown),
        "fingerprint": recipe.fingerprint(),
        **where_and_when(),
    }


def predicted_right(program: str, checkpoint: Path, pictures: str, output: str) -> list[int]:
    """Return for each picture of a folder of class folders whether a checkpoint is right, in the order of the paths."""
    options = ["--ckpt_path", str(checkpoint), "--data.predict", pictures, "--output", output]
    subprocess.run([program, "predict", *options], stdout=subprocess.DEVNULL, check=True)
    with open(output, encoding="utf-8", newline="") as file:
        return [int(Path(row["path"]).parent.name == row["class"]) for row in csv.DictReader(file)]


def as_text(right: Sequence[int]) -> str:
    """Return four pictures a letter, in hexadecimal; the last is filled up with zeros."""
    bits = "".join(map(str, right))
    return "".join(f"{int(bits[i : i + 4].ljust(4, '0'), 2):x}" for i in range(0, len(bits), 4))


def paired(records: list[dict], names: Sequence[str], data: str, image_size: int) -> str:
    """Return how two recipes differ on the same pictures: by McNemar's exact test."""
    from scipy.stats import binomtest

    lines, sums = [], [0, 0]
    for seed in SEEDS:
        found = [
            key(r)
            for name in names
            for r in records
            if key(r) == (name, data, image_size, seed) and "right" in r
        ]
        if len(found) < 2:
            continue
        a, b = (int(next(r for r in records if key(r) == k)["right"], 16) for k in found)
        only = ((a & ~b).bit_count(), (b & ~a).bit_count())
        sums = [sums[0] + only[0], sums[1] + only[1]]
        lines.append((f"seed {seed}", *only))
    if not lines:
        return f"no seed of both {names[0]} and {names[1]} at {image_size} pixels has its answers on record: run them"
    lines.append(("all seeds", *sums))
    return "\n".join(
        f"{what}: only {names[0]} right {a}, only {names[1]} right {b}, p = {binomtest(a, max(1, a + b)).pvalue:.3f}"
        for what, a, b in lines
    )


def valid(records: list[dict]) -> list[dict]:
    """Return the results of the recipes as they are now."""
    return [
        r
        for r in records
        if r["fingerprint"] == Recipe(r["name"], r["data"], r["image_size"]).fingerprint()
    ]


def names_in(records: list[dict]) -> list[str]:
    """Return the recipes that have results, in the order of the table."""
    return [name for name in (*CONFIGS, *PLAIN) if any(r["name"] == name for r in records)]


def tables(records: list[dict]) -> dict[str, str]:
    """Return the Markdown tables of docs/benchmarks.md."""
    hotdog, fashion = ([r for r in records if r["data"] == data] for data in ("hotdog", "fashion"))
    return {
        "recipes": table(hotdog, names_in(hotdog), SIZES),
        "fashion": table(fashion, [recipe.name for recipe in GROUPS[2]], (64,)),
    }


def document() -> None:
    """Write the tables and the chart of what is recorded."""
    records = valid(load(RECORDS))
    fill(ROOT / "docs/benchmarks.md", tables(records))
    hotdog = [r for r in records if r["data"] == "hotdog"]
    if hotdog:
        draw(hotdog, names_in(hotdog), ROOT / "docs/recipes.png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hotdog", help="folder with train/CLASS and test/CLASS")
    parser.add_argument("--fashion_mnist", help="folder with FashionMNIST/raw/*.gz")
    parser.add_argument("--weights", help="state dict of ResNet-18 to start from")
    parser.add_argument("--only", nargs="*", help="names of recipes; all without it")
    parser.add_argument("--image_size", type=int, help="only this size")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no run after this time"
    )
    parser.add_argument(
        "--untimed", action="store_true", help="leave the seconds out: the machine has other work"
    )
    parser.add_argument(
        "--paired", nargs=2, metavar="NAME", help="hold two recipes against each other; run nothing"
    )
    parser.add_argument("--document", action="store_true", help="run nothing")
    args = parser.parse_args()
    if args.paired:
        print(paired(valid(load(RECORDS)), args.paired, "hotdog", args.image_size or SIZES[0]))
        return
    has_failed = False
    deadline = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder:
        roots = {"hotdog": args.hotdog, "fashion": None}
        for recipe, seed in (
            [] if args.document else [(r, s) for g in GROUPS for s in SEEDS for r in g]
        ):
            chosen = (not args.only or recipe.name in args.only) and args.image_size in (
                None,
                recipe.image_size,
            )
            if (
                not chosen
                or is_recorded(load(RECORDS), recipe, seed)
                or time.monotonic() > deadline
            ):
                continue
            if recipe.data == "fashion" and args.fashion_mnist and not roots["fashion"]:
                roots["fashion"] = str(
                    write_fashion_folder(args.fashion_mnist, Path(folder) / "fashion")
                )
            if not roots[recipe.data]:
                continue
            try:
                record = measure(recipe, seed, roots[recipe.data], args.weights)
            except subprocess.CalledProcessError as error:
                has_failed = True
                print(f"{recipe.name}, seed {seed}: exit code {error.returncode}", file=sys.stderr)
                continue
            if args.untimed:
                del record["seconds"]
            # What an earlier version of the recipe gave is replaced.
            save(RECORDS, [r for r in load(RECORDS) if key(r) != key(record)] + [record])
            print(json.dumps(record), flush=True)
    document()
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
