"""Summarises the records: seconds and accuracy of each tool and setting, on a set and over the sets."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.peers.tools import TOOLS
from benchmarks.quality.plan import ON_ONE_SET, SETS, SETTINGS, number

Records = Sequence[dict]
_MOST = 2 / 3


class Point(NamedTuple):
    """The result of a tool's setting on a set, or over sets: seconds of the fastest seed, accuracies of all."""

    tool: str
    setting: str
    # of the fastest seed, which other programs slowed down least; over several sets the mean
    seconds: float
    accuracies: tuple[float, ...]  # of each seed; over several sets the mean of those that have it

    @property
    def accuracy(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def is_ours(self) -> bool:
        return self.tool == "finetune"

    @property
    def is_budget(self) -> bool:
        """Whether it is ours with a time limit, `--minutes`."""
        return self.is_ours and self.setting.startswith("minutes")


def rows() -> list[tuple[str, str]]:
    """Return tools and settings in the order of the tables."""
    return [(tool, setting) for tool, settings in SETTINGS.items() for setting in settings]


def label(tool: str, setting: str) -> str:
    """Return the name of a tool with a setting in a table."""
    name = TOOLS[tool][0]
    if setting == "default":
        return name
    word = setting.partition("_")[0]
    num = number(setting)
    if tool == "finetune":
        return f"{name} --{word} {num:g}"
    return f"{name}, 1 + {num - 1:g} epochs" if tool == "fastai" else f"{name}, {num:g} epochs"


def name_of(point: Point) -> str:
    return label(point.tool, point.setting)


def of_one_machine(records: Records) -> list[dict]:
    """Return the results of the machine with the most: seconds of two machines cannot be compared."""
    good = [r for r in records if "accuracy" in r]
    machine = Counter(r["machine"] for r in good).most_common(1)[0][0]
    return [r for r in good if r["machine"] == machine]


def on_set(records: Records, name: str) -> list[Point]:
    """Return the points on one set."""
    points = []
    for tool, setting in rows():
        found = [r for r in records if (r["set"], r["tool"], r["setting"]) == (name, tool, setting)]
        good = sorted((r for r in found if "accuracy" in r), key=lambda r: r["seed"])
        if good:
            seconds = min(r["seconds"] for r in good)
            points.append(Point(tool, setting, seconds, tuple(r["accuracy"] for r in good)))
    return points


def mean_sets(records: Records) -> list[str]:
    """Return the sets that means are made of: those on which at least `_MOST` of the points are measured."""
    on = {name: {p[:2] for p in on_set(records, name)} - ON_ONE_SET.keys() for name in SETS}
    num = len(set().union(*on.values()))
    return [name for name in SETS if on[name] and len(on[name]) >= _MOST * num]


def over_sets(records: Records) -> list[Point]:
    """Return the means over `mean_sets` of what is measured on each of them, of the seeds that are on all."""
    sets = mean_sets(records)
    points = []
    for tool, setting in rows():
        own = [
            r for r in records if (r["tool"], r["setting"]) == (tool, setting) and "accuracy" in r
        ]
        found = {(r["seed"], r["set"]): r for r in own}
        seeds = [
            seed
            for seed in sorted({seed for seed, _ in found})
            if all((seed, name) in found for name in sets)
        ]
        if sets and seeds:
            of = [[found[seed, name] for name in sets] for seed in seeds]
            accuracies = tuple(statistics.fmean(r["accuracy"] for r in results) for results in of)
            seconds = statistics.fmean(
                min(r["seconds"] for r in results) for results in zip(*of, strict=True)
            )
            points.append(Point(tool, setting, seconds, accuracies))
    return points
