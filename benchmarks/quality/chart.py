"""The chart docs/quality.png: how accurate each tool is after how many seconds."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.documents import chart
from benchmarks.peers.tools import PEERS, TOOLS
from benchmarks.quality.plan import number
from benchmarks.quality.points import Point

OURS = "#c2410c"
_COLOURS = dict(zip(PEERS, ("#475569", "#0e7490", "#1d4ed8", "#7e22ce", "#15803d"), strict=True))
_MARKERS = dict(zip(PEERS, "s^Dvp", strict=True))
_TICKS = {15: "15 s", 30: "30 s", **{60 * n: f"{n} min" for n in (1, 2, 5, 10, 20, 40)}}
# of a label from its point, in points of print, in the order in which they are tried
_OFFSETS = [(8, -3), (-8, -3), (0, 9), (0, -16), (8, 8), (-8, 8), (8, -14), (-8, -14), (8, 20)]
_OFFSETS += [(-8, -26), (0, 34)]


def draw(points: Sequence[Point], num_sets: int, path: Path) -> None:
    """Draw all points, ours of the budgets as a line; hollow where there is one seed, else with their spread.

    Args:
        points: Means over the sets.
        num_sets: How many sets these are.
        path: File that is written.
    """
    with chart(path, (9, 5.2)) as (figure, axes):
        axes.set_xscale("log")
        for tool in [*PEERS, "finetune"]:
            for is_budget in (False, True):
                own = [p for p in points if p.tool == tool and p.is_budget == is_budget]
                draw_line(axes, sorted(own, key=lambda p: p.seconds), tool, is_budget)
        axes.margins(x=0.12, y=0.1)
        low, high = axes.get_xlim()
        ticks = [second for second in _TICKS if low <= second <= high]
        axes.set_xticks(ticks, [_TICKS[second] for second in ticks])
        axes.minorticks_off()
        axes.set_xlabel("the whole command, by the clock")
        axes.set_ylabel(f"test accuracy, mean over {num_sets} {'set' if num_sets == 1 else 'sets'}")
        hollow = {"mfc": "white", "mec": "#6b7280", "ls": "none", "label": "hollow: one seed"}
        axes.plot([], [], marker="o", **hollow)
        axes.grid(alpha=0.25)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
        write_labels(figure, axes, points)


def draw_line(axes: Any, points: Sequence[Point], tool: str, is_budget: bool) -> None:
    """Draw the points of a tool, by seconds, and the line between them."""
    if not points:
        return
    colour = _COLOURS.get(tool, OURS)
    marker = "o" if is_budget else _MARKERS.get(tool, "*")
    width = 2.2 if is_budget else 0.8 if tool in PEERS else 0
    name = TOOLS[tool][0] + (" --minutes" if is_budget else "")
    x, y = [p.seconds for p in points], [p.accuracy for p in points]
    axes.plot(x, y, lw=width, alpha=0.9 if is_budget else 0.5, color=colour)
    axes.plot([], [], marker=marker, lw=width, ms=7, color=colour, label=name)
    for p in points:
        ends = [p.accuracy - spread(p), p.accuracy + spread(p)]
        axes.plot([p.seconds] * 2, ends, lw=1.2, color=colour)
        style = {"ms": 7, "mec": colour, "ls": "none", "zorder": 3}
        face = colour if len(p.accuracies) > 1 else "white"
        axes.plot(p.seconds, p.accuracy, marker=marker, mfc=face, **style)


def write_labels(figure, axes, points: Sequence[Point]) -> list[tuple[float, ...]]:
    """Write the number of epochs or minutes next to each point, where it overlaps no point or label.

    Returns:
        The boxes of points and labels: left, bottom, right, top.
    """
    from matplotlib.patheffects import withStroke

    figure.draw_without_rendering()  # so that places on the figure are known
    size = figure.dpi / 72
    taken = []
    for p in points:
        s = spread(p)
        (x, low), (_, high) = axes.transData.transform(
            [(p.seconds, p.accuracy - s), (p.seconds, p.accuracy + s)]
        )
        taken.append(
            (x - 5 * size, min(low, high - 10 * size), x + 5 * size, max(high, low + 10 * size))
        )
    for p in sorted(points, key=lambda p: p.is_ours):
        box = (0.0,) * 4
        for dx, dy in _OFFSETS:
            align = "left" if dx > 0 else "right" if dx < 0 else "center"
            at = {"xytext": (dx, dy), "textcoords": "offset points", "ha": align, "fontsize": 8}
            note = axes.annotate(
                short(p), (p.seconds, p.accuracy), **at, color=_COLOURS.get(p.tool, OURS)
            )
            note.set_path_effects([withStroke(linewidth=3, foreground="white")])
            left, bottom, right, top = note.get_window_extent().extents
            box = (left - 2 * size, bottom, right + 2 * size, top)
            if not any(overlap(box, other) for other in taken) or (dx, dy) == _OFFSETS[-1]:
                break
            note.remove()
        taken.append(box)
    return taken


def spread(point: Point) -> float:
    return statistics.stdev(point.accuracies) if len(point.accuracies) > 1 else 0.0


def overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    """Return whether two boxes (left, bottom, right, top) have something in common."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def short(point: Point) -> str:
    if point.setting == "default":
        return "default"
    return f"{number(point.setting):g}{' min' if point.is_budget else ' epochs'}"
