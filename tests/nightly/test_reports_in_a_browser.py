"""Pages of runs in a browser, on a phone and in print."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from browser import dom_after, evaluate, needs_browser, scroll_widths
from labels_folder import drawn, write_labels_run
from run_folders import write_run

from finetune.inference.image_viewer import ImageViewer
from finetune.reports.comparison import write_comparison
from finetune.reports.report import write_report
from finetune.runs.record import read_run

pytestmark = needs_browser
VIEWER = ImageViewer(
    lambda path, side: np.full((side, side, 3), 99, np.uint8),
    lambda paths, classes, side: [np.full((side, side, 3), 8 * k, np.uint8) for k in classes],
)


def page_of(run: Path) -> str:
    return write_report(read_run(run), VIEWER, {}).read_text("utf-8")


@pytest.fixture
def page(tmp_path: Path) -> str:
    labels = [0] * 6 + [1] * 3 + [2] * 3
    predicted = np.eye(3)[[0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 0]] * 0.7 + 0.1
    return page_of(write_run(tmp_path / "run", labels, predicted, images=tmp_path / "photos"))


def test_a_cell_opens_its_images(page, tmp_path):
    script = """
        const cell = document.getElementById("cell-0-1"), before = getComputedStyle(cell).display;
        document.querySelector("a[href='#cell-0-1']").click();
        setTimeout(() => document.body.dataset.found = before + " " + getComputedStyle(cell).display, 100);
    """
    assert 'data-found="none block"' in dom_after(page, script, tmp_path)


def test_a_heat_map_is_next_to_its_image_on_a_phone(page, tmp_path):
    places = """Array.from(document.querySelectorAll(".looked-at .picture"), figure =>
        Array.from(figure.querySelectorAll("img"), image => [image.offsetTop, image.offsetWidth]))"""
    pairs = [pair for pair in evaluate(page, places, tmp_path, 390) if len(pair) == 2]
    assert len(pairs) > 5
    assert all(image[0] == heat_map[0] and image[1] > 120 for image, heat_map in pairs)
    # control: one above the other in a narrow column
    narrow = page.replace("minmax(min(100%, 17rem), 1fr)", "4rem")
    pairs = [pair for pair in evaluate(narrow, places, tmp_path, 390) if len(pair) == 2]
    assert all(image[0] < heat_map[0] for image, heat_map in pairs)


def test_in_print_a_heading_is_on_the_page_of_its_images(page, tmp_path):
    breaks = """Array.from(document.querySelectorAll("h3, h3 + p"), element =>
        getComputedStyle(element).breakAfter)"""
    assert set(evaluate(page, breaks, tmp_path, 800, "print")) == {"avoid"}
    assert "auto" in evaluate(page, breaks, tmp_path, 800)  # control: on a screen


def test_no_page_scrolls_sideways(tmp_path):
    names = [f"class {i} {'of_a_long_name' * (i % 4)}" for i in range(1_000)]
    # few test images: a probability of each class is written for each, and read three times
    labels = np.arange(200)
    p = np.full((200, 1_000), 0.1 / 999)
    p[labels, np.where(labels % 5, labels, 0)] = 0.9
    counts = dict.fromkeys(names, 1)
    splits = {name: {"origin": "", "counts": counts} for name in ("train", "val", "test")}
    run = write_run(tmp_path / "run", labels.tolist(), p, names, splits=splits)
    other = shutil.copytree(run, tmp_path / f"run_{'of_a_long_name' * 4}")
    target = tmp_path / "comparison.html"
    write_comparison([read_run(run), read_run(other)], None, target)
    comparison = target.read_text("utf-8")
    page = page_of(run)
    several = page_of(write_labels_run(tmp_path / "several", *drawn()))
    wide = page.replace("<main>", '<main><div style="width: 1490px">x</div>')
    pages = [(page, 375), (comparison, 375), (several, 375), (page, 1440), (wide, 1440)]
    widths = scroll_widths(pages, tmp_path)
    assert all(found <= width for found, (_, width) in zip(widths[:4], pages, strict=False))
    assert widths[4] > 1440  # negative control
