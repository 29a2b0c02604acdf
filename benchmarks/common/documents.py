"""Numbers and tables as text, and the marked blocks of documents that they are written into."""

import re
import statistics
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# The document with all tables, and the short one for users.
NOTEBOOK = ROOT / "benchmarks/NOTEBOOK.md"
PAGE = ROOT / "docs/benchmarks.md"

MARKER = re.compile(r"^<!-- (\w+) -->$", re.M)


def mean_and_spread(values: Sequence[float], digits: int) -> str:
    """Return `mean ± standard deviation`, a single value with `n = 1`, a dash for no value."""
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) == 1:
        return f"{mean} (n = 1)"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}"


def spread(values: Sequence[float], digits: int) -> str:
    """Return the median, and smallest and largest value."""
    low, middle, high = (f"{f(values):,.{digits}f}" for f in (min, statistics.median, max))
    return f"{middle} ({low} to {high})"


def period(days: Collection[str]) -> str:
    """Return the first and the last day, or the only one."""
    first, last = min(days), max(days)
    return first if first == last else f"{first} to {last}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fill(path: Path, blocks: dict[str, str]) -> None:
    """Replace the text between `<!-- NAME -->` and `<!-- /NAME -->` in a file."""
    text = path.read_text("utf-8")
    for name, block in blocks.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        written = f"{block}\n"
        text, num = re.subn(
            pattern, lambda m, written=written: f"{m[1]}{written}{m[2]}", text, flags=re.DOTALL
        )
        if num != 1:
            raise ValueError(
                f"{path} must have one block <!-- {name} --> … <!-- /{name} -->, has {num}"
            )
    path.write_text(text, "utf-8")


def publish(blocks: dict[str, str], pages: Sequence[Path] = (NOTEBOOK, PAGE)) -> None:
    """Write each block into every page that has its markers, and raise if none has.

    Args:
        blocks: The text of each block by its name.
        pages: Files with blocks.
    """
    marked = {page: set(MARKER.findall(page.read_text("utf-8"))) for page in pages}
    if missing := sorted(set(blocks).difference(*marked.values())):
        raise ValueError(f"no page has the blocks {', '.join(missing)}")
    for page, names in marked.items():
        fill(page, {name: block for name, block in blocks.items() if name in names})


@contextmanager
def chart(
    path: Path, size: tuple[float, float], dpi: int = 130, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, without a frame at the top and right, and write it to a file at the end.

    If there are several axes, the first row of them is yielded.

    Args:
        path: The file.
        size: Width and height in inches.
        dpi: Pixels per inch.
        options: Further arguments of `plt.subplots`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=size, layout="constrained", squeeze=False, **options)
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
    yield figure, axes[0, 0] if axes.size == 1 else axes[0]
    figure.savefig(path, dpi=dpi, metadata={"Software": None})
    plt.close(figure)
