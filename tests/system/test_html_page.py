"""Pages in a single file."""

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from browser import dom_after, needs_browser
from jinja2 import UndefinedError
from PIL import Image

from finetune.system import html_page
from finetune.system.html_page import link_to, render, thumbnail, unbroken_flags
from finetune.system.messages import shown

TABLE = """{% extends "system/html_page.html" %}{% block content %}<table class="sortable">
<thead><tr><th>name</th><th>bytes</th><th data-sort="none">image</th></tr></thead><tbody>{% for name, size in rows %}
<tr><td>{{ name|shown }}</td><td data-value="{{ size }}">{{ size }} kB</td><td></td></tr>{% endfor %}
</tbody></table>{% endblock %}"""
ROWS = [("b10", 9), ("b9", 100), ("a<script>alert(1)</script>", 20)]


@pytest.fixture
def page(tmp_path, monkeypatch):
    (tmp_path / "system").mkdir()
    (tmp_path / "system/html_page.html").write_text(
        (html_page._TEMPLATES / "system/html_page.html").read_text()
    )
    (tmp_path / "table.html").write_text(TABLE)
    monkeypatch.setattr(html_page, "_TEMPLATES", tmp_path)
    return render("table.html", title="a & b", rows=ROWS)


def test_a_flag_in_a_sentence_stays_on_one_line():
    html = unbroken_flags("a <b> or --data.val_fraction, more - or less")
    assert html == (
        'a &lt;b&gt; or <span class="nowrap">--data.val_fraction</span>, more - or less'
    )
    assert unbroken_flags("no flag") == "no flag"


class Addresses(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found += [
            value for name, value in attrs if name in ("src", "href", "srcset", "action")
        ]


def test_a_page_is_whole_and_fetches_nothing(page):
    parser = Addresses()
    parser.feed(page)
    assert [address for address in parser.found if not address.startswith(("data:", "#"))] == []
    assert not re.search(r"@import|url\(", page) and "default-src 'none'" in page
    assert page.startswith("<!DOCTYPE html>") and "<title>a &amp; b</title>" in page


def test_names_can_be_no_markup(page):
    assert "a&lt;script&gt;alert(1)" in page and "<script>alert" not in page


def test_a_value_that_is_missing_is_an_error(page):
    with pytest.raises(UndefinedError, match="rows"):
        render("table.html", title="")


def test_names_are_text_on_a_line():
    assert (
        shown("new\nline\x00 caf\xe9 \udcff \u202egnp.exe")
        == "new\\nline\\x00 café \\udcff \\u202egnp.exe"
    )
    assert shown("new\nline").encode() == rb"new\nline"


def test_links_lead_from_the_page_to_the_file(tmp_path):
    assert (
        link_to(str(tmp_path / "a b/c#d%\udcff.jpg"), tmp_path / "out/check.html")
        == "../a%20b/c%23d%25%FF.jpg"
    )


def test_a_thumbnail_holds_the_image_made_smaller():
    source_image = np.zeros((60, 200, 3), np.uint8)
    source_image[:, :100] = (200, 40, 40)
    kind, _, content = thumbnail(source_image, 50).partition(",")
    assert kind == "data:image/webp;base64"
    with Image.open(io.BytesIO(base64.b64decode(content))) as image:
        assert image.size == (50, 15)
        pixels = np.asarray(image.convert("RGB")).astype(int)
    assert np.abs(pixels[7, 10] - (200, 40, 40)).max() < 12 and pixels[7, 40].max() < 12


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(
    ("column", "clicks", "order"), [(0, 1, "a b9 b10"), (1, 1, "b10 a b9"), (1, 2, "b9 a b10")]
)
def test_headings_sort_by_number_and_by_text(page, tmp_path, column, clicks, order):
    click = f"document.querySelectorAll('th')[{column}].querySelector('button').click();" * clicks
    dom = dom_after(page, click, tmp_path)
    names = [name.partition("&")[0] for name in re.findall(r"<td>([^<]+)</td>", dom)]
    assert " ".join(names) == order
    assert dom.count("<button") == 2 and dom.count("aria-sort=") == 1 + page.count("aria-sort=")


def colours(scheme: str) -> dict[str, str]:
    """Return the colour tokens of the pages in a scheme, light or dark."""
    text = (html_page._TEMPLATES / "system/html_page.html").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", text, re.DOTALL)[:2]
    found = dict(re.findall(r"--([\w-]+): (#\w+)", light))
    return found if scheme == "light" else found | dict(re.findall(r"--([\w-]+): (#\w+)", dark))


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


def test_contrast_is_that_of_wcag():
    assert contrast("#fff", "#000000") == pytest.approx(21)
    assert contrast("#777", "#fff") == pytest.approx(4.48, abs=0.01)  # just below AA


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_the_contrast_of_wcag_aa(scheme):
    tokens = colours(scheme)
    text = ("ink", "faint", "accent", "good", "warning", "bad")
    drawn = ("edge", *(name for name in tokens if name.startswith("series-")))
    assert len(drawn) == 8
    for paper in ("paper", "card"):
        assert min(contrast(tokens[name], tokens[paper]) for name in text) >= 4.5
        assert min(contrast(tokens[name], tokens[paper]) for name in drawn) >= 3
