"""Charts as elements of a page: well-formed, in the colours of the page, and accessible to screen readers."""

import os
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from finetune.runs.charts import curves, line_sample, reliability_chart, reliability_panels

SVG = "{http://www.w3.org/2000/svg}"


def check(svg: str) -> ElementTree.Element:
    element = ElementTree.fromstring(svg)
    assert element.get("role") == "img" and element.get("aria-label")
    assert "var(--ink)" in svg and not re.search(r"[: ]#[0-9a-f]{6}\b", svg)  # no colour of its own
    assert "<style" not in svg and "http" not in svg.replace("http://www.w3.org/", "")
    ids = re.findall(r' id="([^"]+)"', svg)
    assert len(ids) == len(set(ids)) and all(f"#{name}" in svg for name in ids)
    return element


def words_of(element: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in element.iter(f"{SVG}text")]


def test_a_chart_has_its_lines_and_words():
    lines = {"a <b>": ([1, 2, 3], [0.5, 0.4, 0.1]), "second": ([1, 3], [1, 2])}
    svg = curves(lines, "epoch", "loss", 'falls, as it "should"', mark=(2, "best.ckpt"))
    element = check(svg)
    assert element.get("aria-label") == 'falls, as it "should"'
    words = words_of(element)
    assert {"epoch", "loss", "a <b>", "second", "best.ckpt"} <= set(words)
    assert {"1", "2", "3"} <= set(words)
    # the same chart, the same text
    assert curves(lines, "epoch", "loss", "x") == curves(lines, "epoch", "loss", "x")


def test_a_legend_is_next_to_the_axes_and_forty_lines_are_distinguished():
    lines = {f"line {i}": ([1, 2, 3], [i, i + 1, i]) for i in range(8)}
    element = check(curves(lines, "epoch", "loss", "x"))
    height_of = {
        "".join(text.itertext()): float(text.get("y", "")) for text in element.iter(f"{SVG}text")
    }
    rows = [y for name, y in height_of.items() if name.startswith("line")]
    # y grows downwards: below the name of the axis
    assert len(rows) == 8 and min(rows) > height_of["epoch"]
    assert "line 0" not in words_of(check(curves(lines, "epoch", "loss", "x", has_legend=False)))
    assert len({line_sample(i) for i in range(40)}) == 40


@pytest.mark.parametrize(
    "name", [r"$\frac$", "$x$", "猫", "<b>&"]
)  # also in letters of no font here
def test_a_name_in_a_chart_is_text(name):
    lines = {name: ([1, 2], [1, 2]), "b": ([1, 2], [2, 1])}
    words = words_of(check(curves(lines, f"recall of {name}", "y", "x")))
    assert {name, f"recall of {name}"} <= set(words)


def test_a_program_keeps_its_own_settings_of_matplotlib(monkeypatch):
    monkeypatch.delenv("MPLCONFIGDIR", raising=False)
    curves({"a": ([1, 2], [1, 2])}, "x", "y", "x")
    assert "MPLCONFIGDIR" not in os.environ
    monkeypatch.setenv("MPLCONFIGDIR", "mine")
    curves({"a": ([1, 2], [1, 2])}, "x", "y", "x")
    assert os.environ["MPLCONFIGDIR"] == "mine"


@pytest.mark.parametrize("rates", [[0.016, 0.03, 0.00008], [0.02, 0.03, 0.025], [0.01, 0.01, 0.01]])
def test_a_logarithmic_axis_has_numbers(rates):
    svg = curves({"head": ([1, 2, 3], rates)}, "step", "learning rate", "x", is_log=True)
    words = words_of(check(svg))
    # no formula is a number
    values = [float(word) for word in words if word not in ("step", "learning rate")]
    assert [value for value in values if 1e-5 < value < 1]


def test_points_lie_where_they_should():
    (line,) = re.findall(
        r'<path d="([^"]+)" clip-path', curves({"": ([0, 1, 2], [0, 1, 0])}, "step", "y", "x")
    )[-1:]
    x, y = np.array(re.findall(r"([\d.]+) ([\d.]+)", line), float).T
    assert x[1] - x[0] == np.round(x[2] - x[1], 4) or abs((x[1] - x[0]) - (x[2] - x[1])) < 1e-3
    assert y[0] == y[2] and y[1] < y[0]  # up is less


def test_the_reliability_of_each_label_has_a_panel():
    few = [(0.1, 0.2, 4), (0.8, 0.5, 3)]
    panels = {
        "a <b>": {"calibrated": few, "uncalibrated": few},
        "ünder": {"calibrated": few[:1]},
        "x" * 40 + "end": {"calibrated": []},
    }
    svg = reliability_panels(panels, "trust", ("probability", "share present"))
    words = words_of(check(svg))
    assert {"a <b>", "ünder", "probability", "share present"} <= set(words)
    assert words.count("calibrated") == 1 and "uncalibrated" in words  # one legend
    assert any(word.startswith("…") and word.endswith("xend") for word in words)
    # the caps of intervals are drawn twice for each dot
    other = reliability_panels({"a <b>": {"calibrated": few}}, "trust", ("p", "q"))
    assert len(re.findall("<use ", svg)) > len(re.findall("<use ", other))


def test_an_axis_of_one_epoch_has_no_parts():
    words = words_of(check(curves({"": ([1], [0.5])}, "epoch", "loss", "x")))
    ticks = words[: words.index("epoch")]
    assert "1" in ticks and all(float(tick) == int(float(tick)) for tick in ticks)


def test_reliability_has_an_interval_for_each_bin_and_no_line_between_them():
    bins = [(0.6, 0.5, 4), (0.8, 1.0, 3), (0.9, 0.7, 16)]
    assert "as said" in words_of(check(reliability_chart({"as said": bins, "none": []}, "x")))
    svg = reliability_chart({"": bins}, "x", 0.5)
    lines = [
        re.findall(r"([\d.]+) ([\d.]+)", path) for path in re.findall(r'<path d="(M[^"]+)"', svg)
    ]
    upright = [line for line in lines if len(line) == 2 and line[0][0] == line[1][0]]
    heights = sorted(abs(float(a[1]) - float(b[1])) for a, b in upright)
    # the grid's lines are as high as the axes; an interval of 16 images is shorter than that of 3 or 4
    assert heights[0] < heights[1] <= heights[2] < heights[-1]
    assert not [line for line in lines if len(line) == 3]
