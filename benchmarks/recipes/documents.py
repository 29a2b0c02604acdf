"""The results as tables in docs/benchmarks.md and as the chart docs/recipes.png."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.common.documents import mean_and_spread

Records = Sequence[dict]

_LABELS = {
    "former_default": "image_folder.yaml until now: random head, batch norm that trains, SGD at 0.03",
    "plain_book": "plain PyTorch, the book's recipe",
    "plain_scratch": "plain PyTorch, the book's from scratch",
    "plain_one_rate": "plain PyTorch, one rate for all",
}
_COLOURS = {128: "#c2410c", 224: "#1d4ed8"}


def label(name: str) -> str:
    return _LABELS.get(name, f"{name}.yaml")


def table(records: Records, names: Iterable[str], sizes: Sequence[int]) -> str:
    """Return a Markdown table: a row for each recipe; accuracy, calibration error and seconds for each picture size."""
    cells = [f"accuracy at {s} | ECE | seconds" for s in sizes]
    lines = [
        "| recipe | " + " | ".join(cells) + " |",
        "| --- |" + " --- | --- | --- |" * len(sizes),
    ]
    for name in names:
        row = [f"{label(name)}"]
        for size in sizes:
            found = [r for r in records if (r["name"], r["image_size"]) == (name, size)]
            row.append(mean_and_spread([r["accuracy"] for r in found], 3))
            errors = [r["calibration_error"] for r in found if "calibration_error" in r]
            row.append(mean_and_spread(errors, 3))
            # not of runs that were paused
            seconds = [r["seconds"] for r in found if "seconds" in r]
            row.append(f"{min(seconds):.0f}" if seconds else "–")
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def draw(records: Records, names: Sequence[str], path: Path) -> None:
    """Draw the test accuracy of each run as a dot, a line for the mean, a row for each recipe."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    sizes = sorted({r["image_size"] for r in records})
    figure, axes = plt.subplots(figsize=(8.5, 0.42 * len(names) + 1.1), layout="constrained")
    for row, name in enumerate(names):
        for size in sizes:
            values = [
                r["accuracy"] for r in records if (r["name"], r["image_size"]) == (name, size)
            ]
            if values:
                y = row + (0.16 if size == sizes[-1] else -0.16) * (len(sizes) > 1)
                axes.plot(values, [y] * len(values), "o", ms=5, alpha=0.7, color=_COLOURS[size])
                axes.plot(
                    [statistics.fmean(values)] * 2, [y - 0.15, y + 0.15], lw=2, color=_COLOURS[size]
                )
    for size in sizes:
        axes.plot([], [], "o-", color=_COLOURS[size], label=f"{size} pixels")
    axes.set_yticks(range(len(names)), [label(name) for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("test accuracy of each run (dot) and their mean (line); 800 test pictures")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path, dpi=130)
