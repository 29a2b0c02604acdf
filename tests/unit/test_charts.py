"""Charts as elements of a page: well-formed, in the colours of the page, and accessible to screen readers."""

import math
import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from finetune.reports.charts import curves, reliability_chart

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


@given(st.lists(st.floats(allow_nan=True, width=32), max_size=9))
def test_a_chart_of_any_values_has_its_points_within_it_and_few_ticks(values):
    line = (list(range(1, len(values) + 1)), values)
    element = check(curves({"a": line}, "epoch", "loss", "x"))
    width, height = (float(text) for text in element.get("viewBox").split()[2:])
    for path in element.iter(f"{SVG}path"):
        for x, y in re.findall(r"([-\d.]+),([-\d.]+)", path.get("d")):
            assert 0 <= float(x) <= width and 0 <= float(y) <= height
    ticks = [float(word) for word in words_of(element) if word not in ("epoch", "loss")]
    assert 2 <= len(ticks) < 30 and all(map(math.isfinite, ticks))


def test_a_reliability_chart_has_an_interval_for_each_bin():
    bins = [(0.3, 0.25, 8), (0.9, 1.0, 4)]
    element = check(reliability_chart(bins, "x", ("confidence", "accuracy")))
    assert {"confidence", "accuracy"} <= set(words_of(element))
    dots = [dot.get("fill") for dot in element.iter(f"{SVG}circle")]
    assert dots == 2 * ["var(--accent)"]
