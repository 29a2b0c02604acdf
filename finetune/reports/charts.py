"""Charts as SVG elements of a page. They have the page's colours: light, dark or for print."""

import io
import logging
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import escape

from finetune.runs.statistics import wilson
from finetune.system.cache_dir import cache_dir

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Placeholder colours in the drawing and the page's variables for them: text, grid lines, then the lines in order.
_PLACEHOLDERS = {
    "#010101": "--ink",
    "#020202": "--line",
    "#030303": "--accent",
    "#040404": "--warning",
    "#050505": "--good",
    **{f"#{10 + i:02d}{10 + i:02d}{10 + i:02d}": f"--series-{i}" for i in range(4, 11)},
}
_INK, _LINE, *_LINE_COLORS = _PLACEHOLDERS
_RC_PARAMS: Any = {
    "svg.fonttype": "none",  # text stays text: small, searchable, in the page's font
    "svg.hashsalt": "finetune",  # the same chart is the same text
    "font.family": "sans-serif",
    "font.size": 10,
    "text.parse_math": False,  # a class may be called $x$
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _LINE,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "axes.prop_cycle": f"cycler('color', {_LINE_COLORS})",
}
# By matplotlib's name, and as the dashes of an SVG line, in widths of the line.
_DASHES = {"-": "", "--": "3.7 1.6", ":": "1 1.65", "-.": "6.4 1.6 1 1.6"}
# inches: width and height of a line chart and of a reliability chart, height of a row of the legend below a chart
_LINE_CHART = (4.4, 2.8)
_RELIABILITY_CHART = (3.8, 3.6)
_LEGEND_ROW = 0.21
_LONGEST = 36  # letters of a legend: more would leave the chart no room

# Mean confidence, accuracy and number of images of each bin, by the name of a series.
Bins = Mapping[str, Sequence[tuple[float, float, int]]]

# Shapes: N points of a line.


def curves(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x: str,
    y: str,
    about: str,
    mark: tuple[float, str] | None = None,
    is_log: bool = False,
    has_legend: bool = True,
) -> str:
    """Draw a line chart. The first forty lines differ in colour or dashes.

    Args:
        lines: Coordinates x and y of each line by its name, N each.
        x: Label of the x axis.
        y: Label of the y axis.
        about: The chart in a sentence, for screen readers.
        mark: A position on the x axis, and its label.
        is_log: Whether the y axis is logarithmic.
        has_legend: Whether several lines have a legend, below the axes; else the page has one of `line_sample`.
    """
    with _page_style():
        figure = _new_figure(_LINE_CHART)
        axes = figure.add_subplot()
        for i, (name, (places, values)) in enumerate(lines.items()):
            color, style = _look_of(i)
            axes.plot(
                places,
                values,
                style,
                color=color,
                label=_shortened(name, _LONGEST),
                marker="o" if len(values) == 1 else "",
            )
        axes.set(xlabel=x, ylabel=y, yscale="log" if is_log else "linear")
        if is_log:
            _write_numbers(axes.yaxis)
        if x == "epoch":
            # only whole epochs have ticks, even if there is only one
            axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        if mark is not None:
            axes.axvline(mark[0], color=_INK, linewidth=0.8, linestyle=":")
            axes.annotate(
                mark[1],
                (mark[0], 1),
                xycoords=("data", "axes fraction"),
                ha="right",
                va="bottom",
                fontsize=9,
            )
        if len(lines) > 1 and has_legend:
            rows = math.ceil(len(lines) / 2)
            figure.set_figheight(_LINE_CHART[1] + _LEGEND_ROW * rows)
            figure.legend(loc="outside lower left", ncols=2)  # inside it would cover lines
        return _as_element(figure, about)


def line_sample(i: int) -> str:
    """Return a piece of line `i` of a chart as SVG, for a legend elsewhere on the page."""
    color, style = _look_of(i)
    dashes = " ".join(f"{2 * float(length):g}" for length in _DASHES[style].split())
    line = (
        f'<line x1="0" y1="5" x2="28" y2="5" stroke="var({_PLACEHOLDERS[color]})" stroke-width="2"'
    )
    return (
        f'<svg width="28" height="10" aria-hidden="true">{line} stroke-dasharray="{dashes}"/></svg>'
    )


def _look_of(i: int) -> tuple[str, str]:
    """Return colour and style of line `i`: neighbours differ in both, and the first forty in one of them."""
    styles = list(_DASHES)
    return _LINE_COLORS[i % len(_LINE_COLORS)], styles[(i + i // 20) % len(styles)]


def reliability_chart(
    panels: Mapping[str, Bins], about: str, names: tuple[str, str], lowest: float = 0.0
) -> str:
    """Draw accuracy by confidence: a dot and its 95 % interval for each bin, and the diagonal as reference.

    Args:
        panels: The bins of each panel by its name. Several panels are drawn two in a row, with one legend.
        about: The chart in a sentence.
        names: Names of the axes.
        lowest: The lowest confidence that is possible.
    """
    in_row = min(2, len(panels))
    num_rows = math.ceil(len(panels) / in_row)
    size = _RELIABILITY_CHART if in_row == 1 else (3.8, 0.6 + 1.7 * num_rows)
    with _page_style():
        figure = _new_figure(size)
        subplots = figure.subplots(num_rows, in_row, sharex=True, sharey=True, squeeze=False)
        grid = subplots.ravel()
        for axes, (label, bins) in zip(grid, panels.items(), strict=False):
            _draw_reliability(axes, bins, lowest, markersize=5 if in_row == 1 else 3.5)
            axes.set_title(_shortened(label, _LONGEST // 2), fontsize=9)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        for axes in grid[-in_row:]:
            axes.set_xlabel(names[0])
        for axes in grid[::in_row]:
            axes.set_ylabel(names[1])
        lines, series = grid[0].get_legend_handles_labels()
        if len(lines) > 1:
            figure.legend(lines, series, loc="outside lower left", ncols=2)
        return _as_element(figure, about)


def _draw_reliability(axes: "Axes", bins: Bins, lowest: float, markersize: float) -> None:
    axes.plot([lowest, 1], [lowest, 1], color=_INK, linewidth=0.8, linestyle="--")
    for marker, (name, rows) in zip("osDv", bins.items(), strict=False):
        confidence, accuracy, _ = np.array(rows).reshape(-1, 3).T
        bounds = np.array([wilson(share * num, int(num)) for _, share, num in rows])
        below, above = np.abs(bounds.reshape(-1, 2).T - accuracy)
        axes.errorbar(
            confidence,
            accuracy,
            yerr=(below, above),
            fmt=marker,
            markersize=markersize,
            capsize=0.6 * markersize,
            elinewidth=1.2,
            label=name,
        )
    start = lowest - 0.03 * (1 - lowest)
    axes.set(xlim=(start, 1.03), ylim=(-0.03, 1.03))


def _shortened(name: str, length: int) -> str:
    """Return a name with at most `length` letters. Long names usually differ at their end."""
    return name if len(name) <= length else f"…{name[1 - length :]}"


def _write_numbers(axis: Any) -> None:
    """Write plain numbers on a logarithmic axis. matplotlib would write formulas, which `_RC_PARAMS` disables."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    axis.set_major_formatter(Plain())
    axis.set_minor_formatter(Plain(labelOnlyBase=False))


@contextmanager
def _page_style() -> Iterator[None]:
    """Draw with the colours and fonts of a page within the context."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    name = "MPLCONFIGDIR"
    before = os.environ.get(name)
    # matplotlib caches a list of fonts. Our cache is used because the user's folder may be read-only.
    os.environ.setdefault(name, str(cache_dir() / "matplotlib"))
    try:
        import matplotlib.figure  # this import makes the list
    finally:  # subprocesses get the user's value
        if before is None:
            os.environ.pop(name, None)  # another thread may have removed it

    with matplotlib.rc_context(_RC_PARAMS):
        yield


def _new_figure(size: tuple[float, float]) -> "Figure":
    """Return a figure to draw on; `size` is its width and height in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")


def _as_element(figure: "Figure", about: str) -> str:
    """Return a figure as an SVG element of a page. Call it within `_page_style`, which also decides how it is written.

    Args:
        figure: The finished drawing.
        about: The chart in a sentence.
    """
    content = io.StringIO()
    nothing: dict[str, Any] = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with warnings.catch_warnings():
        # the page's fonts have these glyphs
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(content, format="svg", transparent=True, metadata=nothing)
    return _inline(content.getvalue(), about)


def _inline(svg: str, about: str) -> str:
    """Return an SVG document as an element of a page: with a label, scalable, in the page's colours."""
    svg = svg[svg.index("<svg") :]
    for placeholder, variable in _PLACEHOLDERS.items():
        svg = svg.replace(placeholder, f"var({variable})")
    # these styles would apply to the whole page
    svg = re.sub(r"<(metadata|defs)>\s*<(style|rdf).*?</\1>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*|(?<=px) 'DejaVu Sans'[^;\"]*", "font-family: inherit", svg)
    used = set(re.findall(r"#([\w.]+)", svg))
    own = blake2b(svg.encode(), digest_size=4).hexdigest()
    svg = re.sub(r' id="([\w.]+)"', lambda match: match[0] if match[1] in used else "", svg)
    svg = re.sub(r'(?<= id=")|(?<="#)|(?<=url\(#)', f"c{own}-", svg)  # IDs are unique on a page
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(about)}" class="chart" ', 1)
