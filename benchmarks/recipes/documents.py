"""The results as tables of benchmarks/NOTEBOOK.md and docs/benchmarks.md."""

from collections.abc import Iterable, Sequence

from benchmarks.common.baseline import LABEL, baseline_accuracies
from benchmarks.common.documents import markdown, mean_and_spread

Records = Sequence[dict]

_LABELS = {
    "former_default": "image_folder.yaml, former defaults: random head, batch norm that trains, SGD at 0.03",
    "plain_book": "plain PyTorch, the book's recipe",
    "plain_scratch": "plain PyTorch, the book's from scratch",
    "plain_one_rate": "plain PyTorch, one rate for all",
}


def label(name: str) -> str:
    return _LABELS.get(name, f"{name}.yaml")


def results_of(records: Records, name: str, size: int) -> Records:
    return [r for r in records if (r["name"], r["image_size"]) == (name, size)]


def table(data: str, records: Records, names: Iterable[str], sizes: Sequence[int]) -> str:
    """Return a row for each recipe: accuracy, calibration error and seconds for each image size.

    Args:
        data: Name of the data set.
        records: The results on it.
        names: The recipes.
        sizes: Sides of the images in pixels.
    """
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
    rows.append([LABEL])
    for size in sizes:
        rows[-1] += [f"{baseline_accuracies(size)[data]:.3f}", "–", "–"]
    head = ["recipe"]
    for size in sizes:
        head += [f"accuracy at {size}", "ECE", "seconds"]
    return markdown(head, rows)
