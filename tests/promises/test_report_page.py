"""The report of a run opens from disk."""

import json

from browser import dom_after, needs_browser
from promise import control, promise


@promise("report")
@control("report")
@needs_browser
def test_the_report_opens_and_shows_the_accuracy(finished, tmp_path):
    """In full: tests/nightly/test_reports_in_a_browser.py; the page of `finetune serve`: test_serve_in_a_browser.py."""
    page = (finished / "report.html").read_text("utf-8")
    accuracy = json.loads((finished / "test.json").read_text())["test/accuracy"]
    script = """
        const link = document.querySelector("a[href^='#cell-']"), cell = document.querySelector(link.hash);
        const before = getComputedStyle(cell).display;
        link.click();
        setTimeout(() => document.body.dataset.found = before + " " + getComputedStyle(cell).display, 100);
    """
    dom = dom_after(page, script, tmp_path)
    assert 'data-found="none block"' in dom and f"{100 * accuracy:.1f}" in dom
    # the control: without the click the cell stays closed
    assert 'data-found="none none"' in dom_after(
        page, script.replace("link.click();", ""), tmp_path
    )
