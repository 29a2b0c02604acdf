"""The page of a review in a browser, by the keyboard alone."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser import needs_browser
from colours import draw_colours
from reviews import MOVED, TOKEN, begin_labelling, job_of

from finetune.data.corrections import parse_corrections
from finetune.review import review_session
from finetune.review.review_app import make_review_app

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_browser


class Served:
    """A review, and the pages that look at it."""

    def __init__(self, session, visitor) -> None:
        self.session = session
        self.job = job_of(session)
        app = make_review_app(session, self.job, TOKEN, "Review of wrong")
        self.address = f"{visitor.serve(app)}{TOKEN}/"
        self.visitor = visitor

    def open(self, **options) -> "Page":
        page = self.visitor.open(self.address, **options)
        page.locator("#work").wait_for(timeout=20_000)
        return page


@pytest.fixture
def serve(visitor, begin):
    def of(root: Path) -> Served:
        served = Served(begin(root), visitor)
        served.job.rank()
        return served

    return of


def wait(page: "Page", condition: str) -> None:
    """Wait until an expression is true. Playwright's own function would need `eval`, which the page forbids."""
    deadline = time.monotonic() + 20
    while not page.evaluate(f"() => {condition}"):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(5)


def press(page: "Page", *keys: str) -> None:
    """Press keys, and wait after each until the page has answered."""
    for key in keys:
        page.keyboard.press(key)
        wait(page, "!busy")


def shown_name(page: "Page") -> str:
    return page.locator("#name").inner_text().split(" (")[0]


def wait_for_name(page: "Page", name: str) -> None:
    wait(page, f"document.getElementById('name').textContent.startsWith({name!r} + ' (')")


def wait_for_another(page: "Page", name: str) -> None:
    wait(page, f"!document.getElementById('name').textContent.startsWith({name!r} + ' (')")


def lines(root: Path) -> list[tuple[str, str, str]]:
    path = root.parent / "corrections.csv"
    content = path.read_bytes() if path.exists() else b"path,was,now,by,when\n"
    return [line[:3] for line in parse_corrections(content, path)]


def test_every_key(serve, wrong):
    page = serve(wrong).open()
    first = shown_name(page)
    assert first in {f"blue/{name.replace('/', '_')}" for name in MOVED}
    press(page, "x")
    wait_for_another(page, first)
    second = shown_name(page)
    press(page, "Space")
    wait_for_another(page, second)
    press(page, "u", "u", "u")
    assert shown_name(page) == first and "nothing to undo" in page.locator("#status").inner_text()
    assert lines(wrong) == [
        (first, "blue", "excluded"),
        (second, "blue", "blue"),
        (second, "blue", ""),
        (first, "blue", ""),
    ]
    press(page, "ArrowRight")
    wait_for_name(page, second)
    press(page, "ArrowLeft")
    wait_for_name(page, first)
    press(page, "1")  # its own class: the label is right
    wait_for_name(page, second)
    assert lines(wrong)[-1] == (first, "blue", "blue")
    for _ in range(5):
        page.keyboard.down("3")  # from the second time on it is a repetition
        wait(page, "!busy")
    page.keyboard.up("3")
    wait_for_another(page, second)
    assert lines(wrong)[-1] == (second, "blue", "red") and len(lines(wrong)) == 6


def test_ten_images_without_labels_are_labelled_by_keyboard(visitor, wrong):
    served = Served(begin_labelling(wrong, "blue", "green", "red"), visitor)
    page = served.open()
    names = []
    for i in range(10):
        names.append(shown_name(page))
        press(page, "Space", str(i % 3 + 1))  # space is no answer
        wait_for_another(page, names[-1])
        if i == 4:
            served.job.rank()
    assert (
        "10 of 60 images labelled: blue 4, green 3, red 3" in page.locator("#counts").inner_text()
    )
    assert not served.job.error and served.session.version == 1
    last = shown_name(page)
    press(page, "u")
    wait_for_name(page, names[-1])
    press(page, "2")
    wait_for_name(page, last)
    press(page, "x")
    answers = ["blue", "green", "red"] * 3 + ["blue", "", "green", "excluded"]
    found = [(line.path, line.was, line.now) for line in served.session.file.lines]
    expected = [*names, names[-1], names[-1], last]
    assert found == [(name, "", now) for name, now in zip(expected, answers, strict=True)]


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_questions_fit_a_screen_and_a_phone(visitor, wrong, width, scheme):
    served = Served(begin_labelling(wrong, "blue", "green", "red"), visitor)
    for _ in range(12):
        i = served.session.state()["next"]
        label = served.session.images.class_names.index(served.session.images.name(i).split("/")[0])
        served.session.decide(i, "change", [label], 0)
    served.job.rank()
    page = served.open(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.locator("#neighbours img").first.wait_for(timeout=20_000)
    page.wait_for_load_state("networkidle")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert "random images" in page.locator("#counts").inner_text()


def test_two_browsers_at_once(serve, wrong):
    served = serve(wrong)
    one, other = served.open(), served.open()
    assert shown_name(one) == shown_name(other)
    name = shown_name(one)
    press(one, "x")
    press(other, "Space")
    other.get_by_text("someone else has decided").wait_for(timeout=20_000)
    assert lines(wrong) == [(name, "blue", "excluded")]
    other.get_by_text("excluded", exact=True).first.wait_for(timeout=20_000)
    press(other, "Space")  # on purpose now
    assert lines(wrong)[-1] == (name, "blue", "blue")


def test_a_new_ranking_keeps_the_image_on_the_page(serve, wrong, monkeypatch):
    monkeypatch.setattr(review_session, "DECISIONS_TO_RANK", 2)
    served = serve(wrong)
    page = served.open()
    for _ in range(2):
        before = shown_name(page)
        press(page, "x")
        wait_for_another(page, before)
    before = shown_name(page)
    served.job.rank()
    assert served.session.version == 2
    assert shown_name(page) == before
    press(page, "x")
    page.get_by_text("The order follows your decisions").wait_for(timeout=20_000)
    assert lines(wrong)[2] == (before, "blue", "excluded")
    press(page, "ArrowLeft")
    wait_for_name(page, before)


def test_several_labels_are_toggled_and_saved_by_space(serve, several):
    page = serve(several).open()
    name = shown_name(page)
    right = name.split("_")[0]
    press(page, "2", str(["any", "blue", "green", "red"].index(right) + 1))
    assert "not saved" in page.locator("#label").inner_text() and lines(several) == []
    press(page, "ArrowRight")
    assert shown_name(page) == name and "not saved" in page.locator("#status").inner_text()
    press(page, "u")
    assert "Labels are right" in page.locator("#right").inner_text()
    press(page, "2", str(["any", "blue", "green", "red"].index(right) + 1))
    assert "Save these labels" in page.locator("#right").inner_text()
    press(page, "Space")
    wait_for_another(page, name)
    second = shown_name(page)
    press(page, "1", "2", "Space")  # no label is left
    wait_for_another(page, second)
    assert lines(several) == [
        (name, "any;blue", f"any;{right}"),
        (second, "any;blue", "[]"),
    ]
    press(page, "u")
    wait_for_name(page, second)
    assert lines(several)[-1] == (second, "any;blue", "")


def test_many_classes_are_found_by_typing(serve, tmp_path):
    root = draw_colours(tmp_path / "many", train=4) / "train"
    for number in range(12):
        (root / f"kind {number}").mkdir()
        (root / "red/00.png").rename(root / f"kind {number}/a.png") if not number else None
        (root / f"kind {number}/b.png").write_bytes(
            (root / "red/01.png").read_bytes()[:-1] + bytes([number])
        )
    page = serve(root).open()
    name = shown_name(page)
    page.keyboard.type("kind 1")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    wait(page, "!busy")
    assert [now for _, _, now in lines(root)] == ["kind 10"]
    wait_for_another(page, name)
    assert page.locator("#finder").is_hidden()
    page.keyboard.type("/x")  # in the finder x is a letter
    assert page.locator("#find").input_value() == "x"
    page.keyboard.press("Escape")
    assert page.locator("#finder").is_hidden() and len(lines(root)) == 1


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_it_fits_a_screen_and_a_phone(serve, wrong, width, scheme):
    page = serve(wrong).open(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.locator("#neighbours img").first.wait_for(timeout=20_000)
    page.wait_for_load_state("networkidle")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    sizes = page.locator("button:visible").evaluate_all(
        "all => all.map(b => b.getBoundingClientRect().height)"
    )
    assert min(sizes) >= 44  # what a finger needs
    if folder := os.environ.get("FINETUNE_TEST_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/review_{width}_{scheme}.png", full_page=True)
