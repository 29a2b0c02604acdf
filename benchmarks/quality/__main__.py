"""Measure accuracy against seconds of `finetune` and its peers, for benchmarks/NOTEBOOK.md.

    pip install -e '.[dev]'
    python -m benchmarks.quality --sets SETS --weights resnet18.pt [--hotdog HOTDOG] [--fashion_mnist FASHION]
        [--timm TIMM] [--only NAMES] [--minutes 60]
    python -m benchmarks.quality --sets SETS --backbone timm/tf_efficientnet_lite0 --weights FOLDER [--timm TIMM]

SETS holds satellite, flowers, clothing and trash, each with train/CLASS and test/CLASS, as HOTDOG does; of FASHION,
with FashionMNIST/raw/*.gz, 2,000 and 1,000 images are taken. Sets without an option are skipped. The peers are those
of benchmarks/peers, in the same environments; TIMM is a checkout of timm, which has train.py. Linux only, and nothing
else on the machine: the seconds count.

The results go to quality.json, those from ImageNet weights to imagenet.json, by machine. Stop at any time, and start
again to continue; `--again` repeats the runs that failed.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.common.documents import ROOT, publish
from benchmarks.common.driver import Benchmark
from benchmarks.common.fashion import write_fashion_folder
from benchmarks.common.records import where_and_when
from benchmarks.peers import materials
from benchmarks.peers.attempts import Workplace, attempt, circumstances, workplace_options
from benchmarks.peers.tools import RESNET
from benchmarks.quality.chart import draw
from benchmarks.quality.commands import train
from benchmarks.quality.documents import blocks, imagenet_blocks
from benchmarks.quality.plan import IMAGENET, IMAGENET_SETTINGS, SETTINGS, SMALL, Run, plan
from benchmarks.quality.points import Records, mean_sets, of_one_machine, over_sets


def plan_here(records: list[dict], settings: Mapping[str, Sequence[str]]) -> Iterator[Run]:
    """Return the runs of this machine; those of another one are measured here again."""
    return plan(records, where_and_when()["machine"], settings)


def write(records: Records) -> None:
    """Write the tables and the chart."""
    here = of_one_machine(records)
    if over_sets(here):
        publish(blocks(records))
        draw(over_sets(here), len(mean_sets(here)), ROOT / "docs/quality.png")


def write_imagenet(records: Records) -> None:
    """Write the table from ImageNet weights."""
    if any("accuracy" in record for record in records):
        publish(imagenet_blocks(records))


# By the network that all tools start from.
BENCHMARKS = {
    RESNET: Benchmark(
        ROOT / "benchmarks/quality/quality.json",
        Run,
        partial(plan_here, settings=SETTINGS),
        write,
        ("tool", "setting", "set"),
    ),
    IMAGENET: Benchmark(
        ROOT / "benchmarks/quality/imagenet.json",
        Run,
        partial(plan_here, settings=IMAGENET_SETTINGS),
        write_imagenet,
        ("tool", "setting", "set"),
    ),
}


class Bench:
    """The sets, for us and for the peers."""

    def __init__(self, roots: dict[str, Path], workplace: Workplace) -> None:
        self.roots = roots
        self.workplace = workplace

    def data(self, run: Run) -> Path:
        """Return a folder of train and test for us, who take validation out of train; of train and val for peers."""
        root = self.roots[run.set]
        if run.set == "fashion":
            root = self.workplace.folder / "fashion"
            if not root.exists():
                write_fashion_folder(self.roots[run.set], root)
        if run.tool == "finetune":
            return root
        data = self.workplace.folder / f"{run.set}_of_peers"
        return data if data.exists() else materials.write_folder(root, data, None, None)

    def measure(self, run: Run) -> dict:
        """Return the result of a run and its circumstances."""
        place = self.workplace.place(run.tool, self.data(run))
        return {**attempt(place, partial(train, run)), **circumstances(run.tool, place.timm)}


def roots_of(args: argparse.Namespace) -> dict[str, Path]:
    """Return the folders of the sets that the options name."""
    roots = {name: args.sets.resolve() / name for name in SMALL} if args.sets else {}
    if args.hotdog:
        roots["hotdog"] = args.hotdog.resolve()
    if args.fashion_mnist:
        roots["fashion"] = args.fashion_mnist
    return roots


def main() -> None:
    parser = BENCHMARKS[RESNET].parser(__doc__)
    parser.add_argument("--sets", type=Path, help=f"folder with {', '.join(SMALL)}")
    parser.add_argument("--hotdog", type=Path, help="folder with train/CLASS and test/CLASS")
    parser.add_argument("--fashion_mnist", type=Path, help="folder with FashionMNIST/raw/*.gz")
    parser.add_argument(
        "--backbone",
        choices=BENCHMARKS,
        default=RESNET,
        help="network that all tools train; for a network of timm, --weights is its folder",
    )
    workplace_options(parser)
    args = parser.parse_args()
    roots = roots_of(args)
    if not args.document and not (roots and args.weights):
        parser.error("--weights and --sets, --hotdog or --fashion_mnist are needed to measure")
    with tempfile.TemporaryDirectory() as folder:
        bench = None if args.document else Bench(roots, Workplace.of(args, folder, args.backbone))
        BENCHMARKS[args.backbone].main(
            args,
            lambda run: bench.measure(run),
            lambda run: run.set in roots and (run.tool != "timm" or bool(args.timm)),
        )


if __name__ == "__main__":
    main()
