"""The results as tables in benchmarks/NOTEBOOK.md and as the chart docs/recipes.png."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.common.documents import chart, markdown, mean_and_spread

Records = Sequence[dict]

_LABELS = {
    "former_default": "image_folder.yaml, former defaults: random head, batch norm that trains, SGD at 0.03",
    "plain_book": "plain PyTorch, the book's recipe",
    "plain_scratch": "plain PyTorch, the book's from scratch",
    "plain_one_rate": "plain PyTorch, one rate for all",
}
_COLOURS = {128: "#c2410c", 224: "#1d4ed8"}


def label(name: str) -> str:
    return _LABELS.get(name, f"{name}.yaml")


def results_of(records: Records, name: str, size: int) -> Records:
    return [r for r in records if (r["name"], r["image_size"]) == (name, size)]


def table(records: Records, names: Iterable[str], sizes: Sequence[int]) -> str:
    """Return a row for each recipe: accuracy, calibration error and seconds for each picture size."""
    rows = []
    for name in names:
        row = [label(name)]
        for size in sizes:
            found = results_of(records, name, size)
            errors = [r["calibration_error"] for r in found if "calibration_error" in r]
            seconds = [r["seconds"] for r in found if "seconds" in r]  # of runs that had no pause
            row += [mean_and_spread([r["accuracy"] for r in found], 3), mean_and_spread(errors, 3)]
            row.append(f"{min(seconds):.0f}" if seconds else "–")
        rows.append(row)
    head = ["recipe"]
    for size in sizes:
        head += [f"accuracy at {size}", "ECE", "seconds"]
    return markdown(head, rows)


def draw(records: Records, names: Sequence[str], path: Path) -> None:
    """Draw the test accuracy of each run as a dot, a line for the mean, a row for each recipe."""
    sizes = sorted({r["image_size"] for r in records})
    with chart(path, (8.5, 0.42 * len(names) + 1.1)) as (_, axes):
        for row, name in enumerate(names):
            for i, size in enumerate(sizes):
                values = [r["accuracy"] for r in results_of(records, name, size)]
                y = row + 0.32 * (i - (len(sizes) - 1) / 2)
                if values:
                    ends = [y - 0.15, y + 0.15]
                    mean = statistics.fmean(values)
                    axes.plot(values, [y] * len(values), "o", ms=5, alpha=0.7, color=_COLOURS[size])
                    axes.plot([mean] * 2, ends, lw=2, color=_COLOURS[size])
        for size in sizes:
            axes.plot([], [], "o-", color=_COLOURS[size], label=f"{size} pixels")
        axes.set_yticks(range(len(names)), [label(name) for name in names])
        axes.invert_yaxis()
        axes.set_xlabel("test accuracy of each run (dot) and their mean (line); 800 test images")
        axes.grid(axis="x", alpha=0.3)
        axes.legend(loc="upper left", frameon=False)
