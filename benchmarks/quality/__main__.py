"""Measure how accurate `finetune` is after how many seconds beside its peers, for docs/benchmarks.md.

    pip install -e '.[dev]'
    python -m benchmarks.quality --sets SETS --weights resnet18.pt [--hotdog HOTDOG] [--fashion_mnist FASHION]
        [--timm TIMM] [--only NAMES] [--minutes 60]

SETS holds satellite, flowers, clothing and trash, each with train/CLASS and test/CLASS, as HOTDOG; of FASHION, with
FashionMNIST/raw/*.gz, 2,000 and 1,000 pictures are taken. What is not given is left out. The peers are those of
benchmarks/peers, in the same environments; TIMM is a checkout of timm, which has train.py. Linux only, and nothing else
on the machine: what counts is seconds.

Each run is added to quality.json beside this as soon as it is there and not done again on this machine: stop at any
time, start again to go on. What failed is recorded too, and done again with `--again` alone. `--document` only writes
the documents.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path

from benchmarks.common.documents import ROOT, fill
from benchmarks.common.fashion import write_fashion_folder
from benchmarks.common.records import load, where_and_when
from benchmarks.common.resume import forget_failed, measure_all
from benchmarks.peers import materials
from benchmarks.peers.attempts import Given, attempt, circumstances
from benchmarks.quality.chart import draw
from benchmarks.quality.commands import train
from benchmarks.quality.documents import blocks, has_chart, of_one_machine
from benchmarks.quality.plan import SETS, SETTINGS, SMALL, Run, key, plan
from benchmarks.quality.points import mean_sets, over_sets

RECORDS = ROOT / "benchmarks/quality/quality.json"
NAMES = (
    [*SETTINGS],
    [*dict.fromkeys(s for settings in SETTINGS.values() for s in settings)],
    [*SETS],
)


class Bench:
    """The sets, as ours and as the peers read them."""

    def __init__(self, roots: dict[str, Path], fashion_mnist: Path | None, given: Given) -> None:
        self.roots = roots
        self.fashion_mnist = fashion_mnist
        self.given = given

    def data(self, run: Run) -> Path:
        """Return a folder of train and test for us, who take validation out of train; of train and val for peers."""
        if run.set not in self.roots:
            self.roots[run.set] = write_fashion_folder(
                self.fashion_mnist, self.given.folder / "fashion"
            )
        root = self.roots[run.set]
        if run.tool == "finetune":
            return root
        data = self.given.folder / f"{run.set}_of_peers"
        return data if data.exists() else materials.write_folder(root, data, None, None)

    def measure(self, run: Run) -> dict:
        """Return a run's record."""
        place = self.given.place(run.tool, self.data(run))
        return {
            **run._asdict(),
            **attempt(place, partial(train, run)),
            **circumstances(run.tool, self.given.timm),
        }


def chooser(
    only: set[str], sets: set[str], has_timm: bool, machine: str
) -> tuple[Callable, Callable]:
    """Return what says whether a run or record is wanted, and what the next run is on this machine.

    Args:
        only: Names of tools, settings and sets; a kind of which none is named is wanted whole.
        sets: Those that are given.
        has_timm: Whether its script is.
        machine: This one; what another has measured is not done.
    """
    tools, settings, names = (only & {*known} or {*known} for known in NAMES)

    def is_wanted(run: Run) -> bool:
        is_given = run.set in sets and (run.tool != "timm" or has_timm)
        return is_given and run.tool in tools and run.setting in settings and run.set in names

    def choose(records: list[dict]) -> Run | None:
        here = [r for r in records if r["machine"] == machine]
        done = {key(r) for r in here}
        return next((run for run in plan(here) if is_wanted(run) and run not in done), None)

    return is_wanted, choose


def document() -> None:
    """Write the tables and the chart of what is recorded."""
    records = load(RECORDS)
    fill(ROOT / "docs/benchmarks.md", blocks(records))
    if has_chart(records):
        here = of_one_machine(records)
        draw(over_sets(here), len(mean_sets(here)), ROOT / "docs/quality.png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", type=Path, help=f"folder with {', '.join(SMALL)}")
    parser.add_argument("--hotdog", type=Path, help="folder with train/CLASS and test/CLASS")
    parser.add_argument("--fashion_mnist", type=Path, help="folder with FashionMNIST/raw/*.gz")
    parser.add_argument("--weights", type=Path, help="state dict of ResNet-18 to start from")
    parser.add_argument(
        "--timm", type=Path, help="checkout of timm with train.py; left out without it"
    )
    parser.add_argument("--environments", type=Path, default=ROOT / "benchmarks/.environments")
    parser.add_argument(
        "--only", nargs="*", default=[], help="names of tools, settings and sets; all without it"
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no run after this time"
    )
    parser.add_argument("--again", action="store_true", help="do again what failed")
    parser.add_argument("--document", action="store_true", help="run nothing")
    args = parser.parse_args()
    if unknown := set(args.only).difference(*NAMES):
        parser.error(f"--only: {', '.join(sorted(unknown))}: none of {', '.join(chain(*NAMES))}")
    roots = {name: args.sets.resolve() / name for name in SMALL} if args.sets else {}
    if args.hotdog:
        roots["hotdog"] = args.hotdog.resolve()
    sets = {*roots, *(["fashion"] if args.fashion_mnist else [])}
    if not args.document and not (sets and args.weights):
        parser.error("--weights and --sets, --hotdog or --fashion_mnist are needed to measure")
    has_failed = False
    if not args.document:
        is_wanted, choose = chooser(
            set(args.only), sets, bool(args.timm), where_and_when()["machine"]
        )
        if args.again:
            forget_failed(RECORDS, lambda record: is_wanted(key(record)))
        with tempfile.TemporaryDirectory() as folder:
            given = (
                path and path.resolve() for path in (args.weights, args.environments, args.timm)
            )
            bench = Bench(roots, args.fashion_mnist, Given(*given, Path(folder)))
            has_failed = measure_all(RECORDS, choose, bench.measure, args.minutes)
    document()
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
