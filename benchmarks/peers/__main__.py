"""Measure accuracy and time of `finetune` and its peers, each with its own recipe, from the same weights.

    python -m benchmarks.peers --sets SETS --weights TIMM_FOLDER --timm TIMM

SETS holds folders with train/CLASS and test/CLASS. The peers are plain PyTorch, timm's train.py, fastai and
transformers' Trainer, each in an environment of its own with the versions of requirements/, offline, called as its
documentation does. They train on all of train, and their accuracy is that of the last epoch; ours holds out a tenth
for validation. TIMM is a checkout of timm at the tag of that version. With OMP_NUM_THREADS=1, CPU time can be compared
on a machine that does other work. Linux only.
"""

import argparse
import hashlib
import shlex
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.driver import Benchmark
from benchmarks.common.records import ROOT, Record
from benchmarks.common.tables import markdown, mean_and_spread
from benchmarks.peers import materials, measure, tools
from benchmarks.peers.tools import OURS, TOOLS
from finetune.models.timm_networks import backbone_of

SHOWN = "timm/tf_efficientnet_lite0"  # the network of the table
OF_ALL = "mean"


class Run(NamedTuple):
    """What identifies a record. Without epochs a tool takes its own number."""

    set: str
    tool: str
    epochs: int | None
    seed: int
    start: str


def plan(args: argparse.Namespace) -> Iterator[Run]:
    """Yield all runs, the short ones first; in each seed the tools take turns, so that a slow hour affects all."""
    names = sorted(folder.name for folder in args.sets.iterdir()) if args.sets else []
    backbone = backbone_of(str(args.weights)) if args.weights else ""
    for seed in range(args.seeds):
        for is_long in (False, True):
            for name in names:
                for tool, (_, epochs, _) in TOOLS.items():
                    if tool != "timm" or args.timm:
                        yield Run(name, tool, epochs[is_long], seed, backbone)


class Bench:
    """The folders of a measurement, made when they are first needed."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.folder = folder

    def place(self, run: Run) -> tools.Place:
        """Return where a tool finds everything, with a new folder for its output."""
        weights = self.args.weights.resolve()
        hub_model = self.folder / "hub_model"
        if not hub_model.exists():
            materials.write_hub_model(weights, hub_model)
        environments = self.args.environments.resolve()
        if run.tool not in tools.IN_OUR_ENVIRONMENT:
            materials.environment(run.tool, environments)
        (environments / "home").mkdir(parents=True, exist_ok=True)
        data = self.args.sets.resolve() / run.set
        if run.tool != OURS:
            of_peers = self.folder / run.set
            data = of_peers if of_peers.exists() else materials.write_folder(data, of_peers)
        return tools.Place(
            data=data,
            out=Path(tempfile.mkdtemp(dir=self.folder)),
            weights=weights,
            hub_model=hub_model,
            environments=environments,
            timm=self.args.timm and self.args.timm.resolve(),
            backbone=run.start,
        )

    def measure(self, run: Run) -> Record:
        """Return the result of a run, or as `failed` why there is none, without the folders of this machine."""
        place = self.place(run)
        try:
            return {**train(run, place), **versions(run.tool, place.timm)}
        except (
            measure.Failed,
            subprocess.TimeoutExpired,
            OSError,
            LookupError,
            ValueError,
        ) as error:
            # A tool that ends without an error and leaves no result has failed as well.
            return {"failed": place.hidden(str(error))[:200]}
        finally:
            shutil.rmtree(place.out)


def train(run: Run, place: tools.Place) -> Record:
    """Return accuracy, number of test images, seconds and memory of the complete command."""
    words = tools.command(run.tool, run.epochs, run.seed, place)
    done = measure.run(words, tools.variables(place))
    split = "test" if run.tool == OURS else "val"
    return {
        "accuracy": round(tools.accuracy(run.tool, place.out, done["output"]), 5),
        "num_test": sum(1 for _ in place.data.glob(f"{split}/*/*")),
        **{name: round(done[name], 2) for name in ("seconds", "cpu_seconds", "memory_mb")},
        "command": place.hidden(shlex.join(words)),
    }


def versions(tool: str, timm: Path | None) -> Record:
    """Return the version of a tool."""
    if tool in tools.IN_OUR_ENVIRONMENT:
        return {}
    found = {"version": materials.pins(tool)[tool]}
    if tool == "timm" and timm:
        found["train_py_sha256"] = hashlib.sha256((timm / "train.py").read_bytes()).hexdigest()[:12]
    return found


def label(tool: str, epochs: int | None) -> str:
    """Return the name of a tool with a length in the table."""
    name = TOOLS[tool][0]
    if epochs is None:
        return name
    return f"{name}, 1 + {epochs - 1} epochs" if tool == "fastai" else f"{name}, {epochs} epochs"


def table(records: Sequence[Record]) -> str:
    """Return accuracy and CPU seconds of each tool and length on each set, and means of those measured on all."""
    shown = [r for r in records if r["start"] == SHOWN]
    counts = {r["set"]: r["num_test"] for r in shown}
    rows = []
    for tool, (_, lengths, _) in TOOLS.items():
        for epochs in lengths:
            found = [r for r in shown if (r["tool"], r["epochs"]) == (tool, epochs)]
            if found:
                rows.append([label(tool, epochs), *cells(found, list(counts))])
    heads = [f"{name}, {num}" for name, num in counts.items()]
    return markdown(["accuracy, CPU time", *heads, OF_ALL], rows)


def cells(records: Sequence[Record], sets: Sequence[str]) -> list[str]:
    """Return accuracy and CPU seconds on each set, and their means if all are measured."""
    shown = []
    accuracies = []
    for name in sets:
        found = [r for r in records if r["set"] == name]
        values = [r["accuracy"] for r in found]
        if not found:
            shown.append("–")
            continue
        text = f"{values[0]:.3f}" if len(values) == 1 else mean_and_spread(values, 3)
        seconds = statistics.fmean(r["cpu_seconds"] for r in found)
        shown.append(f"{text}, {seconds:.0f} s")
        accuracies.append(statistics.fmean(values))
    is_complete = len(accuracies) == len(sets)
    return [*shown, f"{statistics.fmean(accuracies):.3f}" if is_complete else "–"]


BENCHMARK = Benchmark("peers", Run, table)


def main() -> None:
    parser = BENCHMARK.parser(__doc__)
    parser.add_argument("--sets", type=Path, help="folder with sets of train/CLASS and test/CLASS")
    parser.add_argument("--weights", type=Path, help="folder of a network of timm")
    parser.add_argument("--timm", type=Path, help="checkout of timm; without it timm is skipped")
    parser.add_argument("--environments", type=Path, default=ROOT / "benchmarks/.environments")
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    if not args.document and not (args.sets and args.weights):
        parser.error("--sets and --weights are needed to measure")
    with tempfile.TemporaryDirectory() as folder:
        BENCHMARK.main(args, plan(args), Bench(args, Path(folder)).measure)


if __name__ == "__main__":
    main()
