"""Train on all of Fashion-MNIST by hand and through Lightning, on 1, 2 and 4 devices, for docs/benchmarks.md.

    pip install -e '.[dev]'
    python -m benchmarks.recipes.fashion_mnist --root FASHION [--minutes 60]

Each run is a command of its own, whose result is added to fashion_mnist.json beside this as soon as it is there: stop
at any time, start again to go on. `--document` only writes the table from what is recorded. Replicas and processes on a
CPU share its cores.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common.documents import ROOT, fill
from benchmarks.common.records import load, save, where_and_when

RECORDS = ROOT / "benchmarks/recipes/fashion_mnist.json"
_BY_HAND = {k: f"by-hand --devices {','.join(['cpu'] * k)}" for k in (1, 2, 4)}
_FIT = "fit --config fashion_mnist_{}.yaml --trainer.max_epochs {} --trainer.accelerator cpu"
_DDP = "--trainer.devices 2 --trainer.strategy ddp"

# what the table calls a run: the command without its data
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


def measure(name: str, root: str) -> dict:
    """Run one command and return its record."""
    arguments = COMMANDS[name].split()
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(sys.executable).with_name("finetune"))
        places = ["--output", f"{folder}/curve.png", "--root", root]
        if arguments[0] == "fit":
            places = ["--trainer.default_root_dir", folder, "--data.root", root]
        started = time.perf_counter()
        done = subprocess.run(
            [program, *arguments, *places], capture_output=True, text=True, check=True
        )
        seconds = time.perf_counter() - started
        if arguments[0] == "fit":
            test = json.loads(next(Path(folder).glob("fit/version_0/test.json")).read_text("utf-8"))
            result = {"accuracy": round(test["test/accuracy"], 5)}
        else:
            epochs = re.findall(r"accuracy ([\d.]+)  time ([\d.]+) s", done.stdout)
            result = {
                "accuracy": float(epochs[-1][0]),
                "accuracies": [float(accuracy) for accuracy, _ in epochs],
            }
            result |= {"epoch_seconds": [float(seconds) for _, seconds in epochs]}
    return {
        "name": name,
        **result,
        "seconds": round(seconds, 1),
        "command": shlex.join(["finetune", *arguments]),
        **where_and_when(),
    }


def table(records: list[dict]) -> str:
    """Return a Markdown table with a row for each run, in the order of `COMMANDS`."""
    lines = ["| run | test accuracy | seconds | command |", "| --- | --- | --- | --- |"]
    by_name = {record["name"]: record for record in records}
    for name in COMMANDS:
        if record := by_name.get(name):
            lines.append(
                f"| {name} | {record['accuracy']:.4f} | {record['seconds']:.0f} | `{record['command']}` |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", help="folder with Fashion-MNIST's files")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no run after this time"
    )
    parser.add_argument("--document", action="store_true", help="run nothing")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    for name, command in {} if args.document else COMMANDS.items():
        recorded = [r["command"] for r in load(RECORDS) if r["name"] == name]
        if recorded == [f"finetune {command}"] or time.monotonic() > deadline:
            continue
        record = measure(name, args.root)
        save(RECORDS, [r for r in load(RECORDS) if r["name"] != name] + [record])
        print(json.dumps(record), flush=True)
    fill(ROOT / "docs/benchmarks.md", {"fashion_mnist": table(load(RECORDS))})


if __name__ == "__main__":
    main()
