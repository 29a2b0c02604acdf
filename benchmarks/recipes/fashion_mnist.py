"""Train on all of Fashion-MNIST by hand and through Lightning, on 1, 2 and 4 devices, for benchmarks/NOTEBOOK.md.

    pip install -e '.[dev]'
    python -m benchmarks.recipes.fashion_mnist --root FASHION [--minutes 60]

Each run is a command of its own. The results go to fashion_mnist.json. Stop at any time, and start again to continue.
Replicas and processes on a CPU share its cores.
"""

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.documents import ROOT, markdown, publish
from benchmarks.common.driver import Benchmark
from benchmarks.common.records import PROGRAM, where_and_when

_BY_HAND = {k: f"by-hand --devices {','.join(['cpu'] * k)}" for k in (1, 2, 4)}
_FIT = "fit --config fashion_mnist_{}.yaml --trainer.max_epochs {} --trainer.accelerator cpu"
_DDP = "--trainer.devices 2 --trainer.strategy ddp"

# name of a run in the table: the command without its data
COMMANDS = {
    **{f"by hand, {k} × cpu": f"{_BY_HAND[k]} --dtype float32" for k in (1, 2, 4)},
    "LeNet by Lightning, 1 device": _FIT.format("lenet", 10),
    "LeNet by Lightning, ddp on 2": f"{_FIT.format('lenet', 10)} {_DDP}",
    **{
        f"by hand, {k} × cpu, float64, 2 epochs": f"{_BY_HAND[k]} --dtype float64 --epochs 2"
        for k in (1, 2, 4)
    },
    "ResNet-18, 1 device, 3 epochs": f"{_FIT.format('resnet18', 3)} --trainer.precision bf16-mixed",
}


class Run(NamedTuple):
    """What identifies a record."""

    name: str
    command: str


def plan(records: Sequence[dict]) -> list[Run]:
    return [Run(name, f"finetune {command}") for name, command in COMMANDS.items()]


def measure(run: Run, root: str) -> dict:
    """Return the result of a run and its circumstances."""
    arguments = run.command.split()[1:]
    is_fit = arguments[0] == "fit"
    with tempfile.TemporaryDirectory() as folder:
        places = ["--output", f"{folder}/curve.png", "--root", root]
        if is_fit:
            places = ["--trainer.default_root_dir", folder, "--data.root", root]
        command = [PROGRAM, *arguments, *places]
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds = time.perf_counter() - started
        if is_fit:
            test = json.loads(Path(folder, "fit/version_0/test.json").read_text("utf-8"))
            result = {"accuracy": round(test["test/accuracy"], 5)}
        else:
            epochs = re.findall(r"accuracy ([\d.]+)  time ([\d.]+) s", done.stdout)
            accuracies = [float(accuracy) for accuracy, _ in epochs]
            result = {
                "accuracy": accuracies[-1],
                "accuracies": accuracies,
                "epoch_seconds": [float(seconds) for _, seconds in epochs],
            }
    return {**result, "seconds": round(seconds, 1), **where_and_when()}


def table(records: Sequence[dict]) -> str:
    """Return a Markdown table with a row for each run, in the order of `COMMANDS`."""
    good = {BENCHMARK.key(record): record for record in records if "accuracy" in record}
    rows = [
        [
            run.name,
            f"{good[run]['accuracy']:.4f}",
            f"{good[run]['seconds']:.0f}",
            f"`{run.command}`",
        ]
        for run in plan(records)
        if run in good
    ]
    return markdown(["run", "test accuracy", "seconds", "command"], rows)


BENCHMARK = Benchmark(
    ROOT / "benchmarks/recipes/fashion_mnist.json",
    Run,
    plan,
    lambda records: publish({"fashion_mnist": table(records)}),
    ("name",),
)


def main() -> None:
    parser = BENCHMARK.parser(__doc__)
    parser.add_argument("--root", help="folder with Fashion-MNIST's files")
    args = parser.parse_args()
    if not args.document and not args.root:
        parser.error("--root is needed to measure")
    BENCHMARK.main(args, lambda run: measure(run, args.root))


if __name__ == "__main__":
    main()
