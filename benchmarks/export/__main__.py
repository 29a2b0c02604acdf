"""Train ResNet-18 on photographs, export it in float and int8, and measure the files beside the network.

    python -m benchmarks.export --hotdog FOLDER --weights resnet18.pt [--runs FOLDER]

Three seeds of `hotdog.yaml` at 128 pixels, each trained with `finetune fit` where `--runs` has no run of it yet, then
`finetune export`, with `--quantize int8`, and with `--input any_size`. All on the same pictures of the test split, in
one process with as many threads as there are cores, the network and the files taking turns: torch as `Predictor` has it
(float32), the files by onnxruntime. Milliseconds are medians of 60 single pictures, rates of 12 batches of 32. The
pictures are decoded before; those for `--input any_size` are as they are in the files, and resizing counts. The results
of each seed go to benchmarks/export/export.json, and all into docs/benchmarks.md and docs/export.md.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.common.documents import ROOT, fill, mean_and_spread, spread
from benchmarks.common.records import load, save, where_and_when

RECORDS = ROOT / "benchmarks/export/export.json"
SEEDS = (0, 1, 2)
NUM_SINGLE = 60
NUM_BATCHES = 12
BATCH = 32
WAYS = {"torch": "torch", "onnx": "onnx, float", "int8": "onnx, int8"}
Run = Callable[[np.ndarray], np.ndarray]


def finetune(*arguments: object) -> None:
    program = Path(sys.executable).with_name("finetune")
    done = subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"finetune {arguments[0]} ended with {done.returncode}: {done.stderr[-500:]}"
        )


def checkpoint(args: argparse.Namespace, seed: int) -> Path:
    """Return the best checkpoint of a seed's run, trained where it is not there."""
    root = args.runs / f"seed{seed}"
    if not (found := sorted(root.glob("fit/version_*/test.json"))):
        options = [
            "--data.root",
            args.hotdog,
            "--model.weights",
            args.weights,
            "--data.image_size",
            128,
        ]
        options += ["--seed_everything", seed, "--trainer.default_root_dir", root]
        finetune("fit", "--config", "hotdog.yaml", *options)
        found = sorted(root.glob("fit/version_*/test.json"))
    return found[-1].parent / "checkpoints/best.ckpt"


def in_turns(runs: dict[str, Callable[[int], object]], num: int, at_once: int) -> dict[str, float]:
    """Return the median seconds of `num` calls of each, so many at a turn.

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


def measure(best: Path, hotdog: Path, num_pictures: int | None) -> dict:
    """Return what there is to know of the files of one checkpoint."""
    from finetune import ImageFolderData
    from finetune.inference.export_check import opened
    from finetune.inference.predictor import Predictor

    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder, f"{name}.onnx") for name in ("onnx", "int8", "any")}
        options = {
            "onnx": (),
            "int8": ("--quantize", "int8", "--root", hotdog),
            "any": ("--input", "any_size"),
        }
        for name, path in files.items():
            finetune("export", best, "--output", path, *options[name])
        predictor = Predictor(best)
        runs: dict[str, Run] = {name: opened(path) for name, path in files.items()} | {
            "torch": predictor.classify
        }
        sizes = {name: round(path.stat().st_size / 1e6, 2) for name, path in files.items()}
        about = json.loads(Path(folder, "int8.onnx.json").read_text("utf-8"))
    split = ImageFolderData(str(hotdog), val_fraction=0, num_workers=0).splits["test"]
    chosen = np.random.default_rng(0).permutation(len(split.labels))[:num_pictures]
    pictures = [split.read(int(i)) for i in chosen]
    images, labels = (
        np.stack([predictor.prepare(picture) for picture in pictures]),
        split.labels[chosen],
    )
    batches = [images[i : i + BATCH] for i in range(0, len(images), BATCH)]
    said = {
        name: np.concatenate([np.asarray(runs[name](b), np.float64) for b in batches])
        for name in WAYS
    }
    said["any"] = np.concatenate([runs["any"](picture[None]) for picture in pictures]).astype(
        np.float64
    )
    classes = {name: predictor.decide(p) for name, p in said.items()}
    single = {name: lambda i, run=runs[name]: run(images[i % len(images)][None]) for name in WAYS}
    sized = {
        "torch": lambda i: predictor([pictures[i % len(pictures)]]),
        "any": lambda i: runs["any"](pictures[i % len(pictures)][None]),
    }
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
        "milliseconds_any_size": {
            name: round(1000 * s, 2) for name, s in in_turns(sized, NUM_SINGLE, 5).items()
        },
        "pictures_per_second": {
            name: round(BATCH / s, 1) for name, s in in_turns(many, NUM_BATCHES, 2).items()
        },
        "megabytes": sizes,
        "versions": about["versions"],
    }


def table(records: list[dict]) -> str:
    """Return the Markdown table: over the seeds, mean ± standard deviation of accuracies, medians of rates."""

    def row(
        title: str, cell: Callable[[dict, str], float], shown: Callable[[list[float]], str]
    ) -> str:
        return (
            f"| {title} | {' | '.join(shown([cell(r, name) for r in records]) for name in WAYS)} |"
        )

    num = records[0]["num_pictures"]
    rows = [f"| | {' | '.join(WAYS.values())} |", "| --- | --- | --- | --- |"]
    rows.append(
        row("test accuracy", lambda r, n: r["accuracy"][n], lambda v: mean_and_spread(v, 4))
    )
    others = row("another class than torch", lambda r, n: r["num_other"][n], lambda v: spread(v, 0))
    rows.append(others.replace("another class than torch", f"another class than torch, of {num}"))
    rows.append(
        row(
            "largest difference", lambda r, n: r["largest_difference"][n], lambda v: f"{max(v):.1g}"
        )
    )
    rows.append(row("one picture, ms", lambda r, n: r["milliseconds"][n], lambda v: spread(v, 1)))
    rows.append(
        row(
            f"pictures/s by {BATCH}",
            lambda r, n: r["pictures_per_second"][n],
            lambda v: spread(v, 0),
        )
    )
    rows.append(
        row(
            "file, MB",
            lambda r, n: r["megabytes"].get(n, 0),
            lambda v: f"{v[0]:.1f}" if v[0] else "–",
        )
    )
    own, inside = ([r["milliseconds_any_size"][name] for r in records] for name in ("torch", "any"))
    largest = max(r["largest_difference"]["any"] for r in records)
    others = sum(r["num_other"]["any"] for r in records)
    rows.append("")
    rows.append(
        f"`--input any_size`, a photograph as it is: {spread(own, 1)} ms by the checkpoint, {spread(inside, 1)} ms by "
        f"the file; largest difference of a probability {largest:.1g}, another class {others} of {num * len(records)}."
    )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hotdog", type=Path, help="folder with train/CLASS and test/CLASS")
    parser.add_argument("--weights", help="state dict of ResNet-18")
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("runs/benchmark_export"),
        help="where the runs are, or go to",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--num", type=int, help="test pictures; all where it is not given")
    parser.add_argument("--document", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if not args.document:
        for seed in args.seeds:
            found = {
                "seed": seed,
                **measure(checkpoint(args, seed), args.hotdog, args.num),
                **where_and_when(),
            }
            save(
                RECORDS,
                sorted(
                    [r for r in load(RECORDS) if r["seed"] != seed] + [found],
                    key=lambda r: r["seed"],
                ),
            )
            print(json.dumps(found), flush=True)
    for page in ("docs/benchmarks.md", "docs/export.md"):
        fill(ROOT / page, {"export": table(load(RECORDS))})


if __name__ == "__main__":
    main()
