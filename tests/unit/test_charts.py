"""Charts as elements of a page: well-formed, in the colours of the page, and accessible to screen readers."""

import os
import re
from xml.etree import ElementTree

import pytest

from finetune.reports.charts import curves

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
