"""Charts as SVG elements of a page. They have the page's colours: light, dark or for print."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from markupsafe import escape

from finetune.runs.intervals import wilson

_COLORS = ("accent", "warning", "good", *(f"series-{i}" for i in range(4, 11)))
_DASHES = ("", "6.7 2.9", "1.8 3", "11.5 2.9 1.8 2.9")
# Lengths are in units of the drawing, in which text has 10: width and height of a line chart and of a reliability
# chart, height of a row of the legend, mean width of a letter.
_LINE_CHART = (317, 202)
_RELIABILITY_CHART = (274, 250)
_LEGEND_ROW = 15
_LETTER = 5.6
_LONGEST = 48  # letters of a label
_LONGEST_OF_TWO = 21  # letters of a name, for two in a row of the legend
_CLOSE = 0.4  # a point that is closer to the one before is not drawn
_MARGIN = 0.05  # of the range of the values, on each side

# Shapes: N points of a line.

# Mean confidence, accuracy and number of images of each bin.
Bins = Sequence[tuple[float, float, int]]


def curves(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x: str,
    y: str,
    about: str,
    mark: tuple[float, str] | None = None,
    has_legend: bool = True,
) -> str:
    """Draw a line chart. The first forty lines differ in colour or dashes.

    Args:
        lines: Coordinates x and y of each line by its name, N each. Points that are not finite are skipped.
        x: Label of the x axis.
        y: Label of the y axis.
        about: The chart in a sentence, for screen readers.
        mark: A position on the x axis, and its label.
        has_legend: Whether several lines have a legend, below the axes; else the page has one of `line_sample`.
    """
    across = _range_of([value for places, _ in lines.values() for value in places])
    up = _range_of([value for _, values in lines.values() for value in values])
    axes = _Axes(across, up, _LINE_CHART)
    parts = list(axes.frame(x, y, has_whole_x=x == "epoch"))
    if mark is not None:
        parts += axes.mark(*mark)
    for i, (places, values) in enumerate(lines.values()):
        points = list(axes.drawn(zip(places, values, strict=True)))
        parts.append(_dot(i, *points[0]) if len(points) == 1 else _path(points, _look(i)))
    samples = {name: _path([(0, 0), (24, 0)], _look(i)) for i, name in enumerate(lines)}
    return _svg(parts, _LINE_CHART, about, samples if has_legend and len(lines) > 1 else {})


def line_sample(i: int) -> str:
    """Return a piece of line `i` of a chart as SVG, for a legend elsewhere on the page."""
    line = _path([(0, 5), (28, 5)], _look(i))
    return f'<svg width="28" height="10" aria-hidden="true">{line}</svg>'


def reliability_chart(bins: Bins, about: str, names: tuple[str, str], lowest: float = 0.0) -> str:
    """Draw accuracy by confidence: a dot and its 95 % interval for each bin, and the diagonal as reference.

    Args:
        bins: The bins.
        about: The chart in a sentence.
        names: Names of the axes.
        lowest: The lowest confidence that is possible.
    """
    across = _Range(lowest - 0.03 * (1 - lowest), 1.03 - 0.03 * lowest)
    axes = _Axes(across, _Range(-0.03, 1.03), _RELIABILITY_CHART)
    parts = list(axes.frame(*names))
    parts.append(_path(list(axes.drawn([(lowest, lowest), (1, 1)])), _thin("4 2")))
    for confidence, accuracy, num in bins:
        low, high = wilson(accuracy * num, num)
        ends = list(axes.drawn([(confidence, low), (confidence, high)]))
        parts.append(_path(ends, f'stroke="var(--{_COLORS[0]})" stroke-width="1.2"'))
        parts += [_dot(0, *place) for place in axes.drawn([(confidence, accuracy)])]
    return _svg(parts, _RELIABILITY_CHART, about, {})


class _Range(NamedTuple):
    """The values of an axis."""

    low: float
    high: float

    def share(self, value: float) -> float:
        """Return where a value is, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int, is_whole: bool = False) -> list[tuple[float, str]]:
        """Return round values within the range, about `most` of them, with their texts."""
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= rough * (1 - 1e-9))
        if is_whole:
            step = max(1, round(step))
        steps = range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        short = [f"{step * k:.6g}" for k in steps]
        if any("e" in text for text in short):
            return [(step * k, text) for k, text in zip(steps, short, strict=True)]
        decimals = max(len(text.partition(".")[2]) for text in short)
        return [(step * k, f"{step * k:.{decimals}f}") for k in steps]


def _range_of(values: Sequence[float]) -> _Range:
    """Return the range of values, with a margin."""
    finite = [value for value in values if math.isfinite(value)]
    low = min(finite, default=0.0)
    high = max(finite, default=1.0)
    margin = _MARGIN * (high - low) or _MARGIN * abs(high) or 0.5
    return _Range(low - margin, high + margin)


class _Axes:
    """A pair of axes with the ranges `across` and `up`, in a drawing of a size."""

    def __init__(self, across: _Range, up: _Range, size: tuple[int, int]) -> None:
        self.across = across
        self.up = up
        self.y_ticks = up.ticks(size[1] // 30)
        self.left = 20 + _LETTER * max(len(text) for _, text in self.y_ticks)
        self.right = size[0] - 8.0
        self.top = 16.0
        self.bottom = size[1] - 34.0

    def drawn(self, points: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
        """Yield where points are drawn, without those that are nowhere or hardly differ from the one before."""
        last = (math.inf, math.inf)
        for x, y in points:
            place = (
                self.left + self.across.share(x) * (self.right - self.left),
                self.bottom - self.up.share(y) * (self.bottom - self.top),
            )
            if all(map(math.isfinite, place)) and math.dist(place, last) >= _CLOSE:
                yield place
                last = place

    def frame(self, x: str, y: str, has_whole_x: bool = False) -> Iterator[str]:
        """Yield grid, ticks and axes with their labels."""
        left = self.left
        right = self.right
        top = self.top
        bottom = self.bottom
        thin = 'stroke="var(--line)" stroke-width=".6"'
        for value, text in self.across.ticks(round((right - left) / 45), has_whole_x):
            place = left + self.across.share(value) * (right - left)
            yield _path([(place, top), (place, bottom)], thin)
            yield _text(place, bottom + 13, text)
        for value, text in self.y_ticks:
            place = bottom - self.up.share(value) * (bottom - top)
            yield _path([(left, place), (right, place)], thin)
            yield _text(left - 4, place + 3.5, text, "end")
        yield _path([(left, top), (left, bottom), (right, bottom)], 'stroke="var(--line)"')
        yield _text((left + right) / 2, bottom + 28, x)
        upright = f'transform="translate(9 {(top + bottom) / 2:.1f}) rotate(-90)"'
        yield f"<g {upright}>{_text(0, 0, y)}</g>"

    def mark(self, x: float, text: str) -> Iterator[str]:
        """Yield a dotted line at a position on the x axis, and its label above."""
        place = self.left + self.across.share(x) * (self.right - self.left)
        yield _path([(place, self.top), (place, self.bottom)], _thin("1 2"))
        half = _LETTER * len(text) / 2
        yield _text(min(max(place, self.left + half), self.right - half), self.top - 4, text)


def _look(i: int) -> str:
    """Return how line `i` is drawn: neighbours differ in colour and dashes, and the first forty in one of them."""
    dashes = _DASHES[(i + i // 20) % len(_DASHES)]
    color = _COLORS[i % len(_COLORS)]
    return f'stroke="var(--{color})" stroke-width="1.8" stroke-dasharray="{dashes or "none"}"'


def _thin(dashes: str) -> str:
    return f'stroke="var(--ink)" stroke-width=".8" stroke-dasharray="{dashes}"'


def _path(points: Sequence[tuple[float, float]], style: str) -> str:
    """Return a line through points."""
    places = "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<path d="M{places}" fill="none" {style}/>' if points else ""


def _dot(i: int, x: float, y: float) -> str:
    """Return a dot in the colour of line `i`."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.7" fill="var(--{_COLORS[i % len(_COLORS)]})"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    """Return words at a position. Long names usually differ at their end."""
    shown = text if len(text) <= _LONGEST else f"…{text[1 - _LONGEST :]}"
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(shown)}</text>'


def _svg(
    parts: Sequence[str], size: tuple[int, int], about: str, samples: Mapping[str, str]
) -> str:
    """Return a drawing as an element of a page: with a label, scalable, in the page's colours.

    Args:
        parts: Its elements.
        size: Width and height without the legend.
        about: The chart in a sentence.
        samples: The legend below: names, each with a sample.
    """
    width, height = size
    in_row = 1 if any(len(name) > _LONGEST_OF_TWO for name in samples) else 2
    legend = []
    for number, (name, sample) in enumerate(samples.items()):
        row, column = divmod(number, in_row)
        place = f"translate({8 + width // 2 * column} {height + _LEGEND_ROW * row + 7})"
        legend.append(f'<g transform="{place}">{sample}{_text(30, 3.5, name, "start")}</g>')
    whole = height + _LEGEND_ROW * math.ceil(len(samples) / in_row)
    box = f'viewBox="0 0 {width} {whole}" fill="var(--ink)" font-size="10"'
    what = f'role="img" class="chart" aria-label="{escape(about)}"'
    content = "".join([*parts, *legend])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {what} {box}>{content}</svg>'
