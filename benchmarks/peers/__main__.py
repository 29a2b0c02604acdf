"""Measure `finetune` beside its peers, on the same pictures and from the same weights, for benchmarks/NOTEBOOK.md.

    pip install -e '.[dev]'
    python -m benchmarks.peers --root HOTDOG --weights resnet18.pt --timm TIMM [--minutes 60] [--only NAMES]

The peers are plain PyTorch, timm's train.py, fastai, Ultralytics and transformers' Trainer, each in an environment of
its own with the versions of benchmarks/peers/requirements, offline, called as its documentation does. TIMM is a
checkout of timm at the tag of that version: its scripts are not in the package. Linux only.

The results go to compare.json. Stop at any time, and start again to continue; `--again` repeats the runs that failed.
"""

import dataclasses
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.documents import ROOT, publish
from benchmarks.common.driver import Benchmark
from benchmarks.peers import documents, materials, measure, tools
from benchmarks.peers.attempts import Workplace, attempt, circumstances, workplace_options


class Experiment(NamedTuple):
    """What all tools do."""

    num_repeats: int
    num_epochs: int
    num_train: int | None = None  # pictures of each class; None for all
    num_val: int | None = None


EXPERIMENTS = {
    "throughput": Experiment(5, 2, 200, 50),
    "job": Experiment(3, 5),
    "head": Experiment(3, 5),
    "predict": Experiment(3, 1, 50, 50),  # the training before it is not measured
}
_REPEATS_OF_ALL = 2  # whole jobs of every tool; ours and the two fastest peers have more
_SEEDED = ("job",)  # repeat k has seed k, so that the accuracies have a spread
_PREDICTED = (50, 400)  # pictures of each of the two classes


class Run(NamedTuple):
    """What identifies a record."""

    experiment: str
    tool: str
    setting: str
    repeat: int


def fastest_peers(records: Sequence[dict]) -> list[tuple[str, str]]:
    """Return tools and settings of the peers by the seconds of their first whole job, the fastest first.

    If ours was measured, only jobs on the same machine count.
    """
    jobs = [r for r in records if r["experiment"] == "job" and r["repeat"] == 0 and "seconds" in r]
    places = {r.get("machine") for r in jobs if r["tool"] == "finetune"}
    theirs = [
        r for r in jobs if r["tool"] in tools.PEERS and (not places or r.get("machine") in places)
    ]
    return [(r["tool"], r["setting"]) for r in sorted(theirs, key=lambda r: r["seconds"])]


def plan(records: Sequence[dict]) -> Iterator[Run]:
    """Yield all runs. In each repeat all tools take turns, so that a slow hour affects all of them."""
    everybody = [
        (tool, setting) for tool, (_, settings) in tools.TOOLS.items() for setting in settings
    ]
    for repeat in range(EXPERIMENTS["throughput"].num_repeats):
        yield from (Run("throughput", *who, repeat) for who in everybody)
    for repeat in range(EXPERIMENTS["job"].num_repeats):
        some = [("finetune", "default"), *fastest_peers(records)[:2]]
        for who in everybody if repeat < _REPEATS_OF_ALL else some:
            yield Run("job", *who, repeat)
    for repeat in range(EXPERIMENTS["head"].num_repeats):
        for who in everybody:
            if (repeat == 0 or who[0] == "finetune") and ("head", who[0]) not in tools.CANNOT:
                yield Run("head", *who, repeat)
    for repeat in range(EXPERIMENTS["predict"].num_repeats):
        yield from (Run("predict", tool, "default", repeat) for tool in tools.PREDICTING)


def train(run: Run, place: tools.Place) -> dict:
    """Return what a run of `fit` gave."""
    num_epochs = EXPERIMENTS[run.experiment].num_epochs
    seed = run.repeat if run.experiment in _SEEDED else None
    command = tools.fit(
        tools.Training(run.tool, run.setting, run.experiment, num_epochs, seed), place
    )
    done = measure.run(command, tools.variables(place), place.out / "clock.txt")
    num_pictures = sum(1 for _ in place.data.glob("train/*/*"))
    steps = measure.rates(done["stamps"], num_epochs, num_pictures, tools.BATCH_SIZE)
    return {
        **{name: round(done[name], 2) for name in ("seconds", "memory_mb")},
        "accuracy": round(tools.accuracy(run.tool, place.out, done["output"]), 5),
        **{name: round(value, 3) for name, value in steps.items()},
        "command": shlex.join(command),
    }


def predict(tool: str, place: tools.Place, model: Path, folders: dict[int, Path]) -> dict:
    """Return the seconds to classify few and many pictures; their difference does not include the start."""
    seconds = {}
    for num, folder in folders.items():
        command = tools.predict(tool, folder, model, place)
        variables = {**tools.variables(place), "FINETUNE_CACHE": str(place.out / f"cache_{num}")}
        done = measure.run(command, variables, place.out / "clock.txt")
        seconds[num] = done["seconds"]
        shown = shlex.join(command).replace(str(folder), "PICTURES").replace(str(model), "MODEL")
    (few, short), (many, long) = seconds.items()
    return {
        "seconds": round(long, 2),
        "seconds_few": round(short, 2),
        "rate": round((many - few) / (long - short), 1),
        "memory_mb": round(done["memory_mb"], 2),  # of the many
        "command": shown,
    }


class Bench:
    """Folders of pictures and models, made when they are first needed."""

    def __init__(self, root: Path, workplace: Workplace) -> None:
        self.root = root
        self.workplace = workplace
        self.folder = workplace.folder

    def data(self, run: Run) -> Path:
        experiment = EXPERIMENTS[run.experiment]
        return self.pictures(experiment.num_train, experiment.num_val)

    def pictures(self, num_train: int | None, num_val: int | None) -> Path:
        data = self.folder / f"pictures_{num_train}_{num_val}"
        if not data.exists():
            materials.write_folder(self.root, data, num_train, num_val)
        return data

    def measure(self, run: Run) -> dict:
        """Return the result of a run and its circumstances."""
        place = self.workplace.place(run.tool, self.data(run))
        work = self.predict if run.experiment == "predict" else train
        return {**attempt(place, partial(work, run)), **circumstances(run.tool, place.timm)}

    def predict(self, run: Run, place: tools.Place) -> dict:
        model = self.folder / f"model_{run.tool}"
        if not model.exists():
            there = dataclasses.replace(place, out=Path(tempfile.mkdtemp(dir=self.folder)))
            num_epochs = EXPERIMENTS["predict"].num_epochs
            command = tools.fit(tools.Training(run.tool, "default", "job", num_epochs), there)
            measure.run(command, tools.variables(there), there.out / "clock.txt")
            there.out.rename(model)
        folders = [self.pictures(0, num) / "val" for num in _PREDICTED]
        by_num = {sum(1 for _ in folder.glob("*/*")): folder for folder in folders}
        return predict(run.tool, place, model, by_num)


def write(records: Sequence[dict]) -> None:
    publish(documents.tables(records))
    if documents.has_chart(records):
        documents.draw(records, ROOT / "docs/compare.png")


BENCHMARK = Benchmark(
    ROOT / "benchmarks/peers/compare.json", Run, plan, write, ("experiment", "tool")
)


def main() -> None:
    parser = BENCHMARK.parser(__doc__)
    parser.add_argument("--root", type=Path, help="folder with train/CLASS and test/CLASS")
    workplace_options(parser)
    args = parser.parse_args()
    if not args.document and not (args.root and args.weights):
        parser.error("--root and --weights are needed to measure")
    with tempfile.TemporaryDirectory() as folder:
        bench = None if args.document else Bench(args.root.resolve(), Workplace.of(args, folder))
        BENCHMARK.main(
            args, lambda run: bench.measure(run), lambda run: run.tool != "timm" or bool(args.timm)
        )


if __name__ == "__main__":
    main()
