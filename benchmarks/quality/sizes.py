"""Measure which size `--minutes` chooses without `--size`, and how accurate that is beside 128 pixels.

    python -m benchmarks.quality.sizes --sets SETS --weights resnet18.pt [--minutes 60]

Each set and length with and without `--size 128`, in turn; seed 0. The results go to sizes.json and into
benchmarks/NOTEBOOK.md. Stop at any time, and start again to continue.
"""

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import yaml

from benchmarks.common.documents import ROOT, markdown, period, publish
from benchmarks.common.driver import Benchmark
from benchmarks.peers.attempts import Workplace, attempt, circumstances, workplace_options
from benchmarks.peers.tools import Place
from benchmarks.quality import commands, plan

LENGTHS = ("minutes_0.5", "minutes_1", "minutes_2", "default")
GIVEN = (False, True)  # whether `--size 128` is


class Run(NamedTuple):
    """What identifies a record."""

    set: str
    length: str
    is_given: bool


def runs(records: Sequence[dict]) -> Iterator[Run]:
    """Yield all runs in their order."""
    for length, name, is_given in itertools.product(LENGTHS, plan.SMALL, GIVEN):
        yield Run(name, length, is_given)


def train(run: Run, place: Place) -> dict:
    """Return what a run gave, and its size and epochs."""
    of_size = plan.Run(run.set, "finetune", run.length, 0, "")
    result = commands.train(of_size, place, has_size=run.is_given)
    config = yaml.safe_load((place.out / "fit/version_0/config.yaml").read_text("utf-8"))
    size = config["data"]["init_args"]["image_size"]
    return {**result, "size": size, "epochs": config["trainer"]["max_epochs"]}


def cell(record: dict | None) -> str:
    if record is None:
        return "–"
    return f"{record['accuracy']:.3f}, {record['size']} px, {record['seconds']:.0f} s"


def table(records: Sequence[dict]) -> str:
    """Return a row for each length with and without a size, a column for each set: accuracy, size and seconds."""
    good = {BENCHMARK.key(r): r for r in records if "accuracy" in r}
    rows = []
    for length, is_given in itertools.product(LENGTHS, GIVEN):
        row = [good.get(Run(name, length, is_given)) for name in plan.SMALL]
        found = [record for record in row if record]
        mean = "–"
        if len(found) == len(row):
            accuracy = fmean(r["accuracy"] for r in found)
            mean = f"{accuracy:.3f}, {fmean(r['seconds'] for r in found):.0f} s"
        words = "default" if length == "default" else f"`--minutes {plan.number(length):g}`"
        size = "`--size 128`" if is_given else "default"
        rows.append([words, size, *map(cell, row), mean])
    machines = " and ".join(sorted({r["machine"] for r in records}))
    commits = ", ".join(sorted({r["commit"] for r in records}))
    when = period({r["date"] for r in records})
    about = f"{machines}, {when}, finetune at {commits}; seed 0, n = 1 each."
    return f"{about}\n\n{markdown(['length', 'size', *plan.SMALL, 'mean'], rows)}"


BENCHMARK = Benchmark(
    ROOT / "benchmarks/quality/sizes.json",
    Run,
    runs,
    lambda records: publish({"sizes": table(records)}),
)


def main() -> None:
    parser = BENCHMARK.parser(__doc__)
    parser.add_argument("--sets", type=Path, help=f"folder with {', '.join(plan.SMALL)}")
    workplace_options(parser)
    args = parser.parse_args()
    if not args.document and not (args.sets and args.weights):
        parser.error("--sets and --weights are needed to measure")
    with tempfile.TemporaryDirectory() as folder:

        def measure(run: Run) -> dict:
            place = Workplace.of(args, folder).place("finetune", args.sets.resolve() / run.set)
            return {**attempt(place, partial(train, run)), **circumstances("finetune", None)}

        BENCHMARK.main(args, measure)


if __name__ == "__main__":
    main()
