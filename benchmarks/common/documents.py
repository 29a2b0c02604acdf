"""Numbers in documents, and the blocks that they stand in."""

import re
import statistics
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def mean_and_spread(values: Sequence[float], digits: int) -> str:
    """Return `mean ± standard deviation`, the one value where there is one, a dash where there is none."""
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.{digits}f}"
    return (
        f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else f"{mean} (n = 1)"
    )


def spread(values: Sequence[float], digits: int) -> str:
    """Return the median, and smallest and largest value."""
    low, middle, high = (f"{f(values):,.{digits}f}" for f in (min, statistics.median, max))
    return f"{middle} ({low} to {high})"


def fill(path: Path, blocks: dict[str, str]) -> None:
    """Replace what stands between `<!-- NAME -->` and `<!-- /NAME -->` in a file."""
    text = path.read_text("utf-8")
    for name, block in blocks.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text, num = re.subn(
            pattern, lambda m, block=block: f"{m[1]}{block}\n{m[2]}", text, flags=re.DOTALL
        )
        if num != 1:
            raise ValueError(
                f"{path} must have one block <!-- {name} --> … <!-- /{name} -->, has {num}"
            )
    path.write_text(text, "utf-8")
