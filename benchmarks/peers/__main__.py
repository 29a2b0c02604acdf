"""Measure `finetune` next to its peers, on the same images and from the same weights, for benchmarks/NOTEBOOK.md.

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
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.documents import ROOT, publish
from benchmarks.common.driver import Benchmark
from benchmarks.peers import documents, materials, measure, tools
from benchmarks.peers.attempts import Workplace, attempt, circumstances, workplace_options

NUM_EPOCHS = 5
NUM_REPEATS = 3
_REPEATS_OF_ALL = 2  # complete jobs of every tool; ours and the two fastest peers have more
_TRAINED = 50  # images of each of the two classes that the predicting models are trained on
_PREDICTED = (50, 400)  # images of each of the two classes


class Run(NamedTuple):
    """What identifies a record; the experiments are `job` and `predict`."""

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
    for repeat in range(NUM_REPEATS):
        some = [("finetune", "default"), *fastest_peers(records)[:2]]
        for tool, setting in everybody if repeat < _REPEATS_OF_ALL else some:
            yield Run("job", tool, setting, repeat)
    for repeat in range(NUM_REPEATS):
        yield from (Run("predict", tool, "default", repeat) for tool in tools.PREDICTING)


def train(run: Run, place: tools.Place) -> dict:
    """Return the result of a complete job; repeat k has seed k, so that the accuracies have a spread."""
    training = tools.Training(run.tool, run.setting, NUM_EPOCHS, run.repeat)
    command = tools.fit(training, place)
    done = measure.run(command, tools.variables(place), place.out / "clock.txt")
    num_images = sum(1 for _ in place.data.glob("train/*/*"))
    steps = measure.step_times(done["stamps"], NUM_EPOCHS, num_images, tools.BATCH_SIZE)
    return {
        **{name: round(done[name], 2) for name in ("seconds", "memory_mb")},
        "accuracy": round(tools.accuracy(run.tool, place.out, done["output"]), 5),
        **{name: round(value, 3) for name, value in steps.items()},
        "command": shlex.join(command),
    }


def predict(tool: str, place: tools.Place, model: Path, folders: dict[int, Path]) -> dict:
    """Return the seconds to classify few and many images; their difference does not include the start."""
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
    """Folders of images and models, made when they are first needed."""

    def __init__(self, root: Path, workplace: Workplace) -> None:
        self.root = root
        self.workplace = workplace
        self.folder = workplace.folder

    def images(self, num_train: int | None, num_val: int | None) -> Path:
        data = self.folder / f"pictures_{num_train}_{num_val}"
        if not data.exists():
            materials.write_folder(self.root, data, num_train, num_val)
        return data

    def measure(self, run: Run) -> dict:
        """Return the result of a run and its circumstances."""
        if run.experiment == "job":
            place = self.workplace.place(run.tool, self.images(None, None))
            result = attempt(place, lambda place: train(run, place))
        else:
            place = self.workplace.place(run.tool, self.images(_TRAINED, _TRAINED))
            result = attempt(place, lambda place: self.predict(run, place))
        return {**result, **circumstances(run.tool, place.timm)}

    def predict(self, run: Run, place: tools.Place) -> dict:
        model = self.folder / f"model_{run.tool}"
        if not model.exists():
            there = dataclasses.replace(place, out=Path(tempfile.mkdtemp(dir=self.folder)))
            command = tools.fit(tools.Training(run.tool, "default", num_epochs=1), there)
            measure.run(command, tools.variables(there), there.out / "clock.txt")
            there.out.rename(model)
        folders = [self.images(0, num) / "val" for num in _PREDICTED]
        by_num = {sum(1 for _ in folder.glob("*/*")): folder for folder in folders}
        return predict(run.tool, place, model, by_num)


BENCHMARK = Benchmark(
    ROOT / "benchmarks/peers/compare.json",
    Run,
    plan,
    lambda records: publish(documents.tables(records)),
    ("experiment", "tool"),
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
