"""What an epoch of training the head costs when what is frozen is computed anew each time, and when it was kept.

    python -m benchmarks.recipes.frozen --root data/hotdog --weights resnet18.pt [--repeats 3]

Both ways in turn (A B A B …), each `finetune fit --config hotdog_frozen.yaml --data.crop_and_flip false` in a process
of its own with an empty cache. An epoch's seconds are those between its line and the one before, everything included:
a checkpoint is written in between. The results go to benchmarks/recipes/frozen.json and into docs/benchmarks.md.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common.documents import ROOT, fill, spread
from finetune.system.machine import num_cores, processor

RECORDS = ROOT / "benchmarks/recipes/frozen.json"
_EPOCHS = {"anew": 2, "kept": 6}


def measure(way: str, root: str, weights: str, image_size: int) -> dict[str, float]:
    """Return the seconds of a whole run and of its epochs after the first (median)."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "--config": "hotdog_frozen.yaml",
            "--data.root": root,
            "--data.crop_and_flip": "false",
            "--data.image_size": image_size,
            "--data.cache_limit_gb": 8 if way == "kept" else 0,
            "--model.weights": weights,
            "--trainer.max_epochs": _EPOCHS[way],
            "--trainer.default_root_dir": folder,
            "--test_after_fit": "false",
        }
        command = [str(Path(sys.executable).with_name("finetune")), "fit"]
        command += [str(part) for option in options.items() for part in option]
        environment = {**os.environ, "FINETUNE_CACHE": f"{folder}/cache"}
        began, ends = time.perf_counter(), []
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as fit:
            assert fit.stdout is not None
            for line in fit.stdout:
                if line.startswith("epoch "):
                    ends.append(time.perf_counter())
        if fit.returncode or len(ends) != _EPOCHS[way]:
            raise RuntimeError(f"exit code {fit.returncode}, {len(ends)} epochs")
        later = [end - start for start, end in itertools.pairwise(ends)]
        return {"whole": time.perf_counter() - began, "epoch": statistics.median(later)}


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Return medians, smallest and largest value, and the ratio within each repeat."""
    rows = ["| what is frozen | seconds of an epoch after the first | whole run, epochs |", "| --- | --- | --- |"]
    for way, results in found.items():
        epoch, whole = spread([r["epoch"] for r in results], 2), spread([r["whole"] for r in results], 0)
        rows.append(f"| computed {'in every epoch' if way == 'anew' else 'once'} | {epoch} | {whole}, {_EPOCHS[way]} |")
    ratios = [a["epoch"] / k["epoch"] for a, k in zip(found["anew"], found["kept"], strict=True)]
    return "\n".join([*rows, f"| ratio | {spread(ratios, 0)} | |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="folder with train/CLASS/*")
    parser.add_argument("--weights", required=True, help="state dict of ResNet-18 to start from")
    parser.add_argument("--image_size", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in _EPOCHS}
    for _ in range(args.repeats):
        for way, results in found.items():
            results.append(measure(way, args.root, args.weights, args.image_size))
            print(way, {name: round(value, 3) for name, value in results[-1].items()}, flush=True)
    about = {"machine": f"{processor()}, {num_cores()} cores", "image_size": args.image_size}
    RECORDS.write_text(json.dumps({"about": about, "seconds": found}, indent=1) + "\n", "utf-8")
    fill(ROOT / "docs/benchmarks.md", {"frozen": table(found)})
    print(table(found))


if __name__ == "__main__":
    main()
