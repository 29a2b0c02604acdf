"""Train ResNet-18 on photographs, export it in float and int8, and measure the files next to the network.

    python -m benchmarks.speed export --root FOLDER --weights resnet18.pt [--runs FOLDER]

Three seeds of `hotdog.yaml` at 128 pixels, each trained with `finetune fit` where `--runs` has no run of it yet, then
`finetune export`, and with `--quantize` on the training images. All on the same images of the test split, decoded,
in one process with as many threads as there are cores, the network and the files taking turns: torch as `Predictor` has
it (float32), the files by onnxruntime. Milliseconds are medians of 60 single images, rates of 12 batches of 32.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.common.driver import Benchmark
from benchmarks.common.records import PROGRAM, Record
from benchmarks.common.tables import markdown, mean_and_spread, spread

SEEDS = (0, 1, 2)
NUM_SINGLE = 60
NUM_BATCHES = 12
BATCH = 32
WAYS = {"torch": "torch", "onnx": "onnx, float", "int8": "onnx, int8"}
Network = Callable[[np.ndarray], np.ndarray]


class Run(NamedTuple):
    """What identifies a record."""

    seed: int


def finetune(*arguments: object) -> None:
    """Run a command, without its output."""
    subprocess.run([PROGRAM, *map(str, arguments)], stdout=subprocess.DEVNULL, check=True)


def checkpoint(args: argparse.Namespace, seed: int) -> Path:
    """Return the best checkpoint of a seed's run, trained where it is not there."""
    root = args.runs / f"seed{seed}"
    if not (found := sorted(root.glob("fit/version_*/test.json"))):
        options = ["--data.root", args.root, "--model.weights", args.weights]
        options += ["--data.image_size", 128]
        options += ["--seed_everything", seed, "--trainer.default_root_dir", root]
        finetune("fit", "--config", "hotdog.yaml", *options)
        found = sorted(root.glob("fit/version_*/test.json"))
    return found[-1].parent / "checkpoints/best.ckpt"


def in_turns(runs: dict[str, Callable[[int], object]], num: int, at_once: int) -> dict[str, float]:
    """Return the median seconds of `num` calls of each, this many at a turn.

    As many before them don't count: the threads of the library that had its turn before wait busily for a while.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(num // at_once):
        for name, run in runs.items():
            for k in range(2 * at_once):
                began = time.perf_counter()
                run(turn * at_once + k % at_once)
                if k >= at_once:
                    seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure(best: Path, photos: Path, num: int | None) -> Record:
    """Return the measurements of the files of one checkpoint."""
    import torch

    from finetune import ImageFolderData
    from finetune.inference.export_check import load_exported
    from finetune.inference.predictor import Predictor

    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder, f"{name}.onnx") for name in ("onnx", "int8")}
        options = {"onnx": (), "int8": ("--quantize", photos / "train")}
        for name, path in files.items():
            finetune("export", best, "--output", path, *options[name])
        predictor = Predictor(best)
        runs: dict[str, Network] = {name: load_exported(path) for name, path in files.items()} | {
            "torch": predictor.classify
        }
        sizes = {name: round(path.stat().st_size / 1e6, 2) for name, path in files.items()}
        about = json.loads(Path(folder, "int8.onnx.json").read_text("utf-8"))
    split = ImageFolderData(str(photos), val_fraction=0, num_workers=0).splits["test"]
    chosen = np.random.default_rng(0).permutation(len(split))[:num]
    images = np.stack([predictor.prepare(split.read(int(i))) for i in chosen])
    labels = split.targets.labels[chosen]
    batches = [images[i : i + BATCH] for i in range(0, len(images), BATCH)]
    said = {
        name: np.concatenate([np.asarray(runs[name](b), np.float64) for b in batches])
        for name in WAYS
    }
    decide = predictor.calibration.decide
    classes = {name: decide(torch.from_numpy(p)).numpy() for name, p in said.items()}
    single = {name: lambda i, run=runs[name]: run(images[i % len(images)][None]) for name in WAYS}
    many = {
        name: lambda i, run=runs[name]: run(batches[i % (len(images) // BATCH)]) for name in WAYS
    }
    return {
        "num_pictures": len(labels),
        "accuracy": {name: float((c == labels).mean()) for name, c in classes.items()},
        "num_other": {name: int((c != classes["torch"]).sum()) for name, c in classes.items()},
        "largest_difference": {
            name: float(np.abs(p - said["torch"]).max()) for name, p in said.items()
        },
        "milliseconds": {
            name: round(1000 * s, 2) for name, s in in_turns(single, NUM_SINGLE, 5).items()
        },
        "pictures_per_second": {
            name: round(BATCH / s, 1) for name, s in in_turns(many, NUM_BATCHES, 2).items()
        },
        "megabytes": sizes,
        "versions": about["versions"],
    }


def table(records: list[Record]) -> str:
    """Return the Markdown table: over the seeds, mean ± standard deviation of accuracies, medians of rates."""
    num = records[0]["num_pictures"]

    def row(title: str, key: str, shown: Callable[[list[float]], str]) -> list[str]:
        return [title, *(shown([r[key][way] for r in records if way in r[key]]) for way in WAYS)]

    rows = [
        row("test accuracy", "accuracy", lambda v: mean_and_spread(v, 4)),
        row(f"other class than torch, of {num}", "num_other", lambda v: spread(v, 0)),
        row("largest difference", "largest_difference", lambda v: f"{max(v):.1g}"),
        row("one image, ms", "milliseconds", lambda v: spread(v, 1)),
        row(f"images/s, batches of {BATCH}", "pictures_per_second", lambda v: spread(v, 0)),
        row("file, MB", "megabytes", lambda v: f"{v[0]:.1f}" if v else "–"),
    ]
    return markdown(["measured", *WAYS.values()], rows)


BENCHMARK = Benchmark("export", Run, table)


def main() -> None:
    parser = BENCHMARK.parser(__doc__)
    parser.add_argument("--root", type=Path, help="folder with train/CLASS and test/CLASS")
    parser.add_argument("--weights", help="state dict of ResNet-18")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/benchmark_export"), help="where the runs go"
    )
    parser.add_argument("--num", type=int, help="test images; all without it")
    args = parser.parse_args()
    if not args.document and not args.root:
        parser.error("--root is needed to measure")
    BENCHMARK.main(
        args,
        map(Run, SEEDS),
        lambda run: measure(checkpoint(args, run.seed), args.root, args.num),
    )


if __name__ == "__main__":
    main()
