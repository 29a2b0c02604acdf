"""Figures and tables as text, and the blocks of docs/benchmarks.md."""

import re
import statistics
from collections.abc import Iterable, Sequence

from benchmarks.common.records import ROOT

PAGE = ROOT / "docs/benchmarks.md"


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


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def publish(name: str, block: str) -> None:
    """Write a block between `<!-- NAME -->` and `<!-- /NAME -->`."""
    text = PAGE.read_text("utf-8")
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    text, num = re.subn(pattern, lambda m: f"{m[1]}{block}\n{m[2]}", text, flags=re.DOTALL)
    if num != 1:
        raise ValueError(f"{PAGE} must have one block <!-- {name} -->, has {num}")
    PAGE.write_text(text, "utf-8")
