"""Pages in a single file. In a browser, and with names of any kind: test_check.py."""

import re

import pytest

from finetune.system.html_page import render


@pytest.fixture(scope="module")
def page():
    return render("system/html_page.html", title="a & b")


def test_a_page_fetches_nothing(page):
    addresses = re.findall(r"""(?:src|href|srcset|action)=["']?([^"'\s>]+)""", page)
    assert [each for each in addresses if not each.startswith(("data:", "#"))] == []
    assert not re.search(r"@import|url\(", page) and "default-src 'none'" in page
    assert page.startswith("<!DOCTYPE html>") and "<title>a &amp; b</title>" in page


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2.2 of `#abc` or `#aabbcc`."""
    digits = colour.lstrip("#")
    if len(digits) == 3:
        digits = "".join(2 * digit for digit in digits)
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_the_contrast_of_wcag_aa(page, scheme):
    assert contrast("#fff", "#000000") == pytest.approx(21)
    assert contrast("#777", "#fff") == pytest.approx(4.48, abs=0.01)  # just below AA
    light, dark = re.findall(r":root \{(.*?)\}", page, re.DOTALL)[:2]
    rules = light if scheme == "light" else light + dark  # later ones win
    tokens = dict(re.findall(r"--([\w-]+): (#\w+)", rules))
    text = ("ink", "faint", "accent", "good", "warning", "bad")
    drawn = ("edge", *(name for name in tokens if name.startswith("series-")))
    assert len(drawn) == 8
    for paper in ("paper", "card"):
        assert min(contrast(tokens[name], tokens[paper]) for name in text) >= 4.5
        assert min(contrast(tokens[name], tokens[paper]) for name in drawn) >= 3
