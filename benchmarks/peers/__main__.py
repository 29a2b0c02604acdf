"""Measure `finetune` beside its peers, on the same pictures and from the same weights, for docs/benchmarks.md.

    pip install -e '.[dev]'
    python -m benchmarks.peers --root HOTDOG --weights resnet18.pt --timm TIMM [--minutes 60] [--only NAMES]

The peers are plain PyTorch, timm's train.py, fastai, Ultralytics and transformers' Trainer, each in an environment of
its own with the versions of benchmarks/peers/requirements, offline, called as its documentation does. TIMM is a
checkout of timm at the tag of that version: its scripts are not in the package. Linux only.

Each run is added to compare.json beside this as soon as it is there and not done again: stop at any time, start again
to go on. What failed is recorded too, and done again with `--again` alone. `--document` only writes the documents.
"""

import argparse
import dataclasses
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.documents import ROOT, fill
from benchmarks.common.records import load
from benchmarks.common.resume import forget_failed, measure_all
from benchmarks.peers import materials, measure, tools
from benchmarks.peers.attempts import Given, attempt, circumstances
from benchmarks.peers.documents import draw, has_chart, tables

RECORDS = ROOT / "benchmarks/peers/compare.json"
# experiment: (repeats, epochs, training and evaluated pictures of each class: None is all)
EXPERIMENTS = {
    "throughput": (5, 2, 200, 50),
    "job": (3, 5, None, None),
    "head": (3, 5, None, None),
    "predict": (3, 1, 50, 50),  # what is trained first is not measured
}
_OF_ALL = 2  # whole jobs of every tool; ours and the two fastest peers' are more
_SEEDED = ("job",)  # repeat k has seed k, so that the spread is of accuracies, too


class Run(NamedTuple):
    """What there is one record of."""

    experiment: str
    tool: str
    setting: str
    repeat: int


def key(record: dict) -> Run:
    return Run(*(record[name] for name in Run._fields))


def fastest_peers(records: Sequence[dict]) -> list[tuple[str, str]]:
    """Return tools and settings of the peers, those first whose first whole job took less, however well it learned.

    Where we were measured, on that machine alone.
    """
    jobs = [r for r in records if r["experiment"] == "job" and r["repeat"] == 0 and "seconds" in r]
    places = {r.get("machine") for r in jobs if r["tool"] == "finetune"}
    theirs = [
        r for r in jobs if r["tool"] in tools.PEERS and (not places or r.get("machine") in places)
    ]
    return [(r["tool"], r["setting"]) for r in sorted(theirs, key=lambda r: r["seconds"])]


def plan(records: Sequence[dict]) -> Iterator[Run]:
    """Yield all runs in their order: in each repeat all take turns, so that a slow hour is everybody's."""
    everybody = [
        (tool, setting) for tool, (_, settings) in tools.TOOLS.items() for setting in settings
    ]
    for repeat in range(EXPERIMENTS["throughput"][0]):
        yield from (Run("throughput", *who, repeat) for who in everybody)
    for repeat in range(EXPERIMENTS["job"][0]):
        for who in (
            everybody
            if repeat < _OF_ALL
            else [("finetune", "default"), *fastest_peers(records)[:2]]
        ):
            yield Run("job", *who, repeat)
    for repeat in range(EXPERIMENTS["head"][0]):
        for who in everybody:
            if (repeat == 0 or who[0] == "finetune") and ("head", who[0]) not in tools.CANNOT:
                yield Run("head", *who, repeat)
    for repeat in range(EXPERIMENTS["predict"][0]):
        yield from (Run("predict", tool, "default", repeat) for tool in tools.PREDICTING)


def train(run: Run, place: tools.Place) -> dict:
    """Return what a run of `fit` gave."""
    _, epochs, *_ = EXPERIMENTS[run.experiment]
    seed = run.repeat if run.experiment in _SEEDED else None
    command = tools.fit(run.tool, run.setting, run.experiment, epochs, place, seed)
    done = measure.run(command, tools.variables(place), place.out / "clock.txt")
    num_pictures = sum(1 for _ in place.data.glob("train/*/*"))
    result = {name: round(done[name], 2) for name in ("seconds", "memory_mb")}
    result["accuracy"] = round(tools.accuracy(run.tool, place.out, done["output"]), 5)
    steps = measure.rates(done["stamps"], epochs, num_pictures, tools.BATCH_SIZE)
    return {
        **result,
        **{name: round(value, 3) for name, value in steps.items()},
        "command": shlex.join(command),
    }


def predict(run: Run, place: tools.Place, model: Path, folders: dict[int, Path]) -> dict:
    """Return what classifying a few and many pictures took; their difference knows nothing of the start."""
    seconds = {}
    memory = 0.0
    command = []
    for num, folder in folders.items():
        command = tools.predict(run.tool, folder, model, place)
        variables = {**tools.variables(place), "FINETUNE_CACHE": str(place.out / f"cache_{num}")}
        done = measure.run(command, variables, place.out / "clock.txt")
        seconds[num], memory = done["seconds"], done["memory_mb"]
    (few, short), (many, long) = seconds.items()
    shown = shlex.join(command).replace(str(folders[many]), "PICTURES").replace(str(model), "MODEL")
    rate = round((many - few) / (long - short), 1)
    times = {"seconds": round(long, 2), "seconds_few": round(short, 2), "rate": rate}
    return {**times, "memory_mb": round(memory, 2), "command": shown}  # of the many


class Bench:
    """Folders of pictures and models, made when they are first wanted."""

    def __init__(self, root: Path, given: Given) -> None:
        self.root = root
        self.given = given
        self.folder = given.folder

    def data(self, run: Run) -> Path:
        _, _, num_train, num_val = EXPERIMENTS[run.experiment]
        data = self.folder / f"pictures_{num_train}_{num_val}"
        if not data.exists():
            materials.write_folder(self.root, data, num_train, num_val)
        return data

    def measure(self, run: Run) -> dict:
        """Return a run's record."""
        place = self.given.place(run.tool, self.data(run))
        result = attempt(
            place, partial(self.predict if run.experiment == "predict" else train, run)
        )
        return {**run._asdict(), **result, **circumstances(run.tool, self.given.timm)}

    def predict(self, run: Run, place: tools.Place) -> dict:
        model = self.folder / f"model_{run.tool}"
        if not model.exists():
            _, epochs, *_ = EXPERIMENTS["predict"]
            there = dataclasses.replace(place, out=Path(tempfile.mkdtemp(dir=self.folder)))
            command = tools.fit(run.tool, "default", "job", epochs, there)
            measure.run(command, tools.variables(there), there.out / "clock.txt")
            there.out.rename(model)
        folders = {}
        for num in (50, 400):  # of each of the two classes
            folder = self.folder / f"predict_{num}"
            if not folder.exists():
                materials.write_folder(self.root, folder, 0, num)
            folders[sum(1 for _ in folder.glob("val/*/*"))] = folder / "val"
        return predict(run, place, model, folders)


def document() -> None:
    """Write the tables and the chart of what is recorded."""
    records = load(RECORDS)
    fill(ROOT / "docs/benchmarks.md", tables(records))
    if has_chart(records):
        draw(records, ROOT / "docs/compare.png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, help="folder with train/CLASS and test/CLASS")
    parser.add_argument("--weights", type=Path, help="state dict of ResNet-18 to start from")
    parser.add_argument(
        "--timm",
        type=Path,
        help="checkout of timm with train.py and inference.py; left out without it",
    )
    parser.add_argument("--environments", type=Path, default=ROOT / "benchmarks/.environments")
    parser.add_argument("--only", nargs="*", help="names of experiments and tools; all without it")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no run after this time"
    )
    parser.add_argument("--again", action="store_true", help="do again what failed")
    parser.add_argument("--document", action="store_true", help="run nothing")
    args = parser.parse_args()
    if not args.document and not (args.root and args.weights):
        parser.error("--root and --weights are needed to measure")
    wanted = set(args.only or [])
    experiments, names = (
        wanted & EXPERIMENTS.keys() or EXPERIMENTS,
        wanted & tools.TOOLS.keys() or tools.TOOLS,
    )
    if unknown := wanted - {*EXPERIMENTS, *tools.TOOLS}:
        parser.error(
            f"--only: {', '.join(unknown)} are none of {', '.join([*EXPERIMENTS, *tools.TOOLS])}"
        )
    if args.again:
        forget_failed(RECORDS, lambda r: r["experiment"] in experiments and r["tool"] in names)

    def choose(records: list[dict]) -> Run | None:
        done = {key(r) for r in records}
        chosen = (
            r
            for r in plan(records)
            if r.experiment in experiments and r.tool in names and r not in done
        )
        return next((r for r in chosen if r.tool != "timm" or args.timm), None)

    has_failed = False
    if not args.document:
        with tempfile.TemporaryDirectory() as folder:
            root, *given = (
                path and path.resolve()
                for path in (args.root, args.weights, args.environments, args.timm)
            )
            bench = Bench(root, Given(*given, Path(folder)))
            has_failed = measure_all(RECORDS, choose, bench.measure, args.minutes)
    document()
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
