"""Measure how the time of a training step changes with the number of processes, and write docs/parallelism.md's tables.

    pip install -e '.[dev]'
    python -m benchmarks.scaling

It takes about eight minutes on two cores, which nothing else should use. Each process has one thread; the batch is the
same for any number of them (strong scaling). The results go to scaling.json; a case that has changed is measured again.
Stop at any time, and start again to continue. `--document` only writes tables and chart.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.common.documents import ROOT, fill
from benchmarks.common.driver import Benchmark
from benchmarks.common.records import where_and_when
from benchmarks.scaling.documents import draw, tables
from benchmarks.scaling.steps import COUNTS, Case, Transport, measure
from finetune.system.machine import num_cores

REPEATS = 7

_RESNET = {"network": "resnet18", "batch_size": 32, "image_size": 64, "num_steps": 2}
_CUT = {**_RESNET, "batch_norm": "frozen", "num_micro_batches": 4}
_HEAD = {**_RESNET, "batch_norm": "frozen", "num_classes": 100_000}
CASES = (
    Transport("all-reduce", (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 50_000_000)),
    Case("ddp, LeNet", "ddp", "lenet", 256, 28, 10),
    Case("ddp, frozen batch norm", "ddp", **_RESNET, batch_norm="frozen"),
    Case("ddp, batch norm over all", "ddp", **_RESNET, batch_norm="shared"),
    Case("pipeline gpipe", "gpipe", **_CUT),
    Case("pipeline 1f1b", "1f1b", **_CUT),
    Case("layer-wise, 100,000 classes", "layer-wise", **_HEAD),
)


class Run(NamedTuple):
    """What identifies a record."""

    name: str
    fingerprint: str


def run_of(case: Case | Transport) -> Run:
    """Return the run of a case; it changes with the case."""
    return Run(case.name, hashlib.sha256(repr(case).encode()).hexdigest()[:12])


def plan(records: Sequence[dict]) -> list[Run]:
    return [run_of(case) for case in CASES]


def current(records: Sequence[dict]) -> dict[str, dict]:
    """Return the records by the name of their case, without those of cases that have changed."""
    runs = {run_of(case) for case in CASES}
    return {r["name"]: r for r in records if BENCHMARK.key(r) in runs and "seconds" in r}


def measured(run: Run, repeats: int) -> dict:
    """Return the result of a case and its circumstances."""
    case = next(case for case in CASES if case.name == run.name)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (case, repeats, folder), nprocs=max(COUNTS))
        seconds = json.loads(Path(folder, "seconds.json").read_text("utf-8"))
    rounded = {name: [float(f"{x:.4g}") for x in values] for name, values in seconds.items()}
    command = "python -m benchmarks.scaling"
    return {"seconds": rounded, "command": command, "cores": num_cores(), **where_and_when()}


def write(records: Sequence[dict]) -> None:
    """Write the tables and the chart if all cases are measured."""
    by_name = current(records)
    if missing := [case.name for case in CASES if case.name not in by_name]:
        print(f"the documents stay as they are: not measured yet: {'; '.join(missing)}")
        return
    fill(ROOT / "docs/parallelism.md", tables(CASES, by_name))
    draw(CASES, by_name, ROOT / "docs/parallelism/scaling.png")


BENCHMARK = Benchmark(ROOT / "benchmarks/scaling/scaling.json", Run, plan, write, ("name",))


def main() -> None:
    parser = BENCHMARK.parser(__doc__)
    parser.add_argument(
        "--repeats", type=int, default=REPEATS, help="rounds through the settings of a case"
    )
    args = parser.parse_args()
    BENCHMARK.main(args, lambda run: measured(run, args.repeats))


if __name__ == "__main__":
    main()
