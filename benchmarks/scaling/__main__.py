"""Measure how the time of a training step changes with the number of processes, and write docs/parallelism.md's tables.

    pip install -e '.[dev]'
    python -m benchmarks.scaling

It takes about eight minutes on two cores, which nothing else should use. Each process has one thread; the batch is the
same for any number of them (strong scaling). Every case is added to scaling.json beside this as soon as it is there,
and is not measured again unless it changes: stop at any time, start again to go on.
`--document` only writes tables and chart from what is recorded.
"""

import argparse
import hashlib
import os
import tempfile

import torch

from benchmarks.common.documents import ROOT, fill
from benchmarks.common.records import load as read
from benchmarks.common.records import save as write
from benchmarks.common.records import where_and_when
from benchmarks.scaling.chart import draw
from benchmarks.scaling.documents import tables
from benchmarks.scaling.steps import COUNTS, Case, Transport, measure
from finetune.system.machine import num_cores

RECORDS = ROOT / "benchmarks/scaling/scaling.json"
REPEATS = 7

_RESNET = {"network": "resnet18", "batch_size": 32, "image_size": 64, "num_steps": 2}
_CUT = {**_RESNET, "batch_norm": "frozen", "num_micro_batches": 4}
CASES = (
    Transport("all-reduce", (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 50_000_000)),
    Case("ddp, LeNet", "ddp", "lenet", 256, 28, 10),
    Case("ddp, frozen batch norm", "ddp", **_RESNET, batch_norm="frozen"),
    Case("ddp, batch norm over all", "ddp", **_RESNET, batch_norm="shared"),
    Case("pipeline gpipe", "gpipe", **_CUT),
    Case("pipeline 1f1b", "1f1b", **_CUT),
    Case(
        "layer-wise, 100,000 classes",
        "layer-wise",
        **_RESNET,
        batch_norm="frozen",
        num_classes=100_000,
    ),
)


def load() -> dict[str, dict]:
    """Return the records so far by the name of their case, without those of cases that have changed."""
    now = {case.name: fingerprint(case) for case in CASES}
    return {r["name"]: r for r in read(RECORDS) if r["fingerprint"] == now.get(r["name"])}


def fingerprint(case: Case | Transport) -> str:
    """Return what changes when the case does."""
    return hashlib.sha256(repr(case).encode()).hexdigest()[:12]


def save(case: Case | Transport, seconds: dict[str, list[float]]) -> None:
    """Add what was measured to the records."""
    record = {
        "name": case.name,
        "seconds": {
            name: [float(f"{value:.4g}") for value in values] for name, values in seconds.items()
        },
        "fingerprint": fingerprint(case),
        "command": "python -m benchmarks.scaling",
        "cores": num_cores(),
        **where_and_when(),
    }
    records = load() | {case.name: record}
    write(RECORDS, [records[case.name] for case in CASES if case.name in records])
    print(
        case.name,
        {
            name: f"{1000 * sorted(values)[len(values) // 2]:.1f} ms"
            for name, values in seconds.items()
        },
    )


def document() -> None:
    """Write the tables and the chart of what is recorded."""
    records = load()
    if missing := [case.name for case in CASES if case.name not in records]:
        print(
            f"documents are left as they are, since these are not measured yet: {'; '.join(missing)}"
        )
        return
    fill(ROOT / "docs/parallelism.md", tables(CASES, records))
    draw(CASES, records, ROOT / "docs/parallelism/scaling.png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", help="names of cases, measured although they are recorded"
    )
    parser.add_argument(
        "--repeats", type=int, default=REPEATS, help="rounds through the settings of a case"
    )
    parser.add_argument("--document", action="store_true", help="measure nothing")
    args = parser.parse_args()
    records = load()
    wanted = [
        case
        for case in CASES
        if (case.name in args.only if args.only else case.name not in records)
    ]
    if wanted and not args.document:
        os.environ["OMP_NUM_THREADS"] = "1"
        with tempfile.TemporaryDirectory() as folder:
            arguments = (wanted, args.repeats, f"{folder}/rendezvous", save)
            torch.multiprocessing.spawn(measure, arguments, nprocs=max(COUNTS))
    document()


if __name__ == "__main__":
    # by its name: what is spawned finds nothing in a package's `__main__`
    from benchmarks.scaling.__main__ import main

    main()
