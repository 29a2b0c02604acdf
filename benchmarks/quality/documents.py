"""The records as tables of benchmarks/NOTEBOOK.md and docs/benchmarks.md."""

import statistics
from collections.abc import Sequence

from benchmarks.common.baseline import LABEL, baseline_accuracies
from benchmarks.common.documents import markdown, mean_and_spread, period
from benchmarks.peers.tools import IMAGE_SIZE, RESNET
from benchmarks.quality.plan import IMAGENET, SEEDS, SETS
from benchmarks.quality.points import (
    Point,
    Records,
    label,
    mean_sets,
    name_of,
    of_one_machine,
    on_set,
    over_sets,
    rows,
)
from benchmarks.quality.targets import summary


def cell(point: Point | None) -> str:
    if point is None:
        return "–"
    some = f" (n = {len(point.accuracies)})" if 1 < len(point.accuracies) < len(SEEDS) else ""
    return f"{mean_and_spread(point.accuracies, 3)}{some}, {point.seconds:.0f} s"


def table(records: Records, start: str = RESNET) -> str:
    """Return accuracy and seconds of each tool and setting on each set, and the mean if there are several sets.

    Args:
        records: Results of one machine.
        start: The pretrained network of the logistic regression.
    """
    names = [name for name in SETS if any(r["set"] == name for r in records)]
    nums = {r["set"]: r["num_test"] for r in records if "num_test" in r}
    columns = {
        f"{name}, {nums.get(name, '–')}": {p[:2]: p for p in on_set(records, name)}
        for name in names
    }
    averaged = mean_sets(records)
    if len(averaged) > 1:
        columns["mean"] = {p[:2]: p for p in over_sets(records)}
    lines = [
        [label(*row), *(cell(points.get(row)) for points in columns.values())]
        for row in rows()
        if any(row in points for points in columns.values())
    ]
    return markdown(["", *columns], [*lines, baseline_row(names, averaged, start)])


def baseline_row(names: Sequence[str], averaged: Sequence[str], start: str) -> list[str]:
    """Return the row of the logistic regression: its accuracy on each set, and the mean over `averaged`."""
    by_set = baseline_accuracies(IMAGE_SIZE, start)
    cells = [f"{by_set[name]:.3f}" if name in by_set else "–" for name in names]
    return [LABEL, *cells, *([baseline_mean(averaged, start)] if len(averaged) > 1 else [])]


def baseline_mean(names: Sequence[str], start: str = RESNET) -> str:
    """Return the mean accuracy of the logistic regression over sets."""
    by_set = baseline_accuracies(IMAGE_SIZE, start)
    return f"{statistics.fmean(by_set[name] for name in names):.3f}"


def means(records: Records) -> str:
    """Return the mean accuracy over the sets and the seconds of each tool and setting."""
    points = sorted(over_sets(records), key=lambda point: point.seconds)
    lines = [
        [name_of(p), f"{p.seconds:.0f}", mean_and_spread(p.accuracies, 3), str(len(p.accuracies))]
        for p in points
    ]
    lines.append([LABEL, "–", baseline_mean(mean_sets(records)), "–"])
    return markdown(["tool", "seconds", "mean accuracy", "seeds"], lines)


def about(records: Records) -> str:
    """Return with what, where and when it was measured on one machine, and what the means are of."""
    versions = sorted(
        {f"{name} {version}" for r in records for name, version in r["versions"].items()}
    )
    ours = sorted({r["commit"] for r in records if r["tool"] == "finetune"})
    when = period({r["date"] for r in records})
    parts = [
        f"{records[0]['machine']}, {when}; {', '.join(versions)}",
        f"finetune at {', '.join(ours) or '–'}",
    ]
    if len(mean_sets(records)) > 1:
        parts.append(f"the means are over {', '.join(mean_sets(records))}")
    return f"{'; '.join(parts)}."


def blocks(records: Records) -> dict[str, str]:
    """Return the blocks of the pages: of the machine with the most results."""
    here = of_one_machine(records)
    chart = "![Mean accuracy over the sets against seconds, of each tool](../docs/quality.png)"
    return {
        "quality_about": about(here),
        "quality_accuracy": f"{table(here)}\n\n{chart}",
        "quality_targets": summary(here),
        "quality_means": means(here),
    }


def imagenet_blocks(records: Records) -> dict[str, str]:
    """Return the blocks of the comparison from ImageNet weights, with seconds of processor time."""
    here = of_one_machine(in_cpu_seconds(records))
    return {
        "quality_imagenet_about": about(here),
        "quality_imagenet": table(here, IMAGENET),
    }


def in_cpu_seconds(records: Records) -> list[dict]:
    """Return the results with processor time as their seconds: other programs change it least."""
    return [{**r, "seconds": r["cpu_seconds"]} for r in records if "cpu_seconds" in r]
