"""What size `--minutes` chooses where none is given, and how accurate that is beside 128 pixels.

    python -m benchmarks.quality.sizes --sets SETS --weights resnet18.pt [--minutes 60]

Each set and length with and without `--size 128`, in turn; seed 0. Each run is added to sizes.json beside this as soon
as it is there: stop at any time, start again to go on. `--document` only writes the table in docs/benchmarks.md.
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import yaml

from benchmarks.common.documents import ROOT, fill
from benchmarks.common.records import load
from benchmarks.common.resume import measure_all
from benchmarks.peers.attempts import Given, attempt, circumstances
from benchmarks.peers.tools import Place
from benchmarks.quality import commands, plan

RECORDS = ROOT / "benchmarks/quality/sizes.json"
LENGTHS = ("minutes_0.5", "minutes_1", "minutes_2", "default")
GIVEN = (False, True)  # whether a size of 128 is


class Run(NamedTuple):
    """What there is one record of."""

    set: str
    length: str
    is_given: bool


def runs() -> Iterator[Run]:
    """Yield all runs in their order."""
    for length, name, is_given in itertools.product(LENGTHS, plan.SMALL, GIVEN):
        yield Run(name, length, is_given)


def key(record: dict) -> Run:
    return Run(*(record[name] for name in Run._fields))


def train(run: Run, place: Place) -> dict:
    """Return what a run gave, and at which size over how many epochs."""
    of_size = plan.Run(run.set, "finetune", run.length, 0)
    result = commands.train(of_size, place, has_size=run.is_given)
    config = yaml.safe_load((place.out / "fit/version_0/config.yaml").read_text("utf-8"))
    return {
        **result,
        "size": config["data"]["init_args"]["image_size"],
        "epochs": config["trainer"]["max_epochs"],
    }


def cell(record: dict | None) -> str:
    return (
        f"{record['accuracy']:.3f}, {record['size']} px, {record['seconds']:.0f} s"
        if record
        else "–"
    )


def table(records: Sequence[dict]) -> str:
    """Return a row for each length with and without a size, a column for each set: accuracy, size and seconds."""
    found = {key(r): r for r in records if "accuracy" in r}
    rows = [
        f"| length | size | {' | '.join(plan.SMALL)} | mean |",
        "| --- " * (len(plan.SMALL) + 3) + "|",
    ]
    for length, is_given in itertools.product(LENGTHS, GIVEN):
        row = [found.get(Run(name, length, is_given)) for name in plan.SMALL]
        there = [record for record in row if record]
        means = (
            [fmean(r[what] for r in there) for what in ("accuracy", "seconds")]
            if len(there) == len(row)
            else []
        )
        mean = "{:.3f}, {:.0f} s".format(*means) if means else "–"
        words = "as it is" if length == "default" else f"`--minutes {plan.number(length):g}`"
        size = "`--size 128`" if is_given else "none given"
        rows.append(f"| {words} | {size} | {' | '.join(map(cell, row))} | {mean} |")
    places, days, codes = (
        sorted({r[name] for r in records}) for name in ("machine", "date", "commit")
    )
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    return "\n".join(
        [
            f"{' and '.join(places)}, {when}, finetune at {', '.join(codes)}; seed 0, n = 1 each.",
            "",
            *rows,
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", type=Path, help=f"folder with {', '.join(plan.SMALL)}")
    parser.add_argument("--weights", type=Path, help="state dict of ResNet-18 to start from")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no run after this time"
    )
    parser.add_argument("--document", action="store_true", help="run nothing")
    args = parser.parse_args()
    if not args.document and not (args.sets and args.weights):
        parser.error("--sets and --weights are needed to measure")
    has_failed = False
    if not args.document:
        with tempfile.TemporaryDirectory() as folder:
            given = Given(
                args.weights.resolve(), ROOT / "benchmarks/.environments", None, Path(folder)
            )

            def measure(run: Run) -> dict:
                place = given.place("finetune", args.sets.resolve() / run.set)
                return {
                    **run._asdict(),
                    **attempt(place, partial(train, run)),
                    **circumstances("finetune", None),
                }

            def choose(records: list[dict]) -> Run | None:
                done = {key(r) for r in records}
                return next((run for run in runs() if run not in done), None)

            has_failed = measure_all(RECORDS, choose, measure, args.minutes)
    fill(ROOT / "docs/benchmarks.md", {"sizes": table(load(RECORDS))})
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
