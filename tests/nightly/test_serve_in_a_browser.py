"""The page of `finetune serve` in a browser: images dropped, pasted and chosen, by mouse and by keyboard alone."""

import base64
import json
from typing import TYPE_CHECKING

import pytest
from browser import needs_browser
from probabilities import probabilities
from services import LIMITS, image_bytes

from finetune.data.decode import decode
from finetune.inference.predictor import Predictor
from finetune.serving.app import make_app
from finetune.serving.service import Service

if TYPE_CHECKING:
    from playwright.sync_api import FileChooser, Page

pytestmark = needs_browser

DROP = """([name, type, content, event]) => {
  const bytes = Uint8Array.from(atob(content), c => c.charCodeAt(0)), moved = new DataTransfer();
  moved.items.add(new File([bytes], name, {type}));
  const given = event === "paste" ? new ClipboardEvent("paste", {clipboardData: moved, bubbles: true, cancelable: true})
    : new DragEvent("drop", {dataTransfer: moved, bubbles: true, cancelable: true});
  document.getElementById("drop").dispatchEvent(given);
}"""
PHONE = {"viewport": {"width": 390, "height": 800}}


@pytest.fixture(scope="module")
def predictor(fitted_runs):
    return Predictor(fitted_runs.single / "checkpoints/best.ckpt")


@pytest.fixture
def address(visitor, predictor):
    return visitor.serve(make_app(Service(predictor, LIMITS, 4), None, "127.0.0.1"))


@pytest.fixture
def page(visitor, address):
    return visitor.open(address, **PHONE)


def give(
    page: "Page", content: bytes, name: str = "a.png", kind: str = "image/png", event: str = "drop"
) -> None:
    page.evaluate(DROP, [name, kind, base64.b64encode(content).decode(), event])


def wait_for(page: "Page", what: str, number: int = 1) -> None:
    page.locator(what).nth(number - 1).wait_for(timeout=20_000)


def fulfil(page: "Page", path: str, answer: dict, status: int = 200) -> None:
    """Let the service answer this."""
    page.route(path, lambda route: route.fulfill(status=status, body=json.dumps(answer)))


def predicted(label: str, probabilities: dict[str, float]) -> dict:
    one = {"name": "a", "label": label, "probability": probabilities[label]}
    return {"predictions": [{**one, "probabilities": probabilities, "heatmap": None}]}


@pytest.mark.parametrize("event", ["drop", "paste"])
def test_an_image_that_is_dropped_or_pasted_gets_its_verdict(page, predictor, event):
    give(page, image_bytes(), event=event)
    wait_for(page, ".result")
    best = predictor.class_names[int(probabilities(predictor, [decode(image_bytes())])[0].argmax())]
    result = page.locator(".result")
    assert result.locator(".verdict").inner_text() == best
    assert result.locator(".bars span").count() == 2 * 2  # the other two of three classes
    assert "%" in result.inner_text() and page.locator("#status").inner_text() == ""


def test_several_images_are_answered_each_and_a_bad_one_says_why(page):
    for number in range(2):
        give(page, image_bytes(number), f"{number}.png")
    give(page, b"hello", "note.txt", "text/plain")
    give(page, bytes(200_001), "large.png")
    give(page, b"<!DOCTYPE html><html></html>", "cat.jpg")
    wait_for(page, ".result", 5)
    assert page.locator(".verdict").count() == 2
    bad = "\n".join(sorted(page.locator(".bad").all_inner_texts()))
    for words in ("note.txt: cannot be decoded", "large.png: too large", "its first bytes are"):
        assert words in bad


def test_the_keyboard_is_enough(page):
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.id") == "choose"
    chosen: list[FileChooser] = []
    page.on("filechooser", lambda chooser: chosen.append(chooser))
    for _ in range(30):  # Chromium opens no dialogue for a page that has just come
        page.keyboard.press("Enter")
        page.wait_for_timeout(500)
        if chosen:
            break
    chosen[0].set_files(
        [{"name": f"{i}.png", "mimeType": "image/png", "buffer": image_bytes(i)} for i in range(2)]
    )
    wait_for(page, ".result", 2)
    for name in ("photograph", "heatmap"):
        page.keyboard.press("Tab")
        assert page.evaluate("() => document.activeElement.id") == name
    page.keyboard.press("Space")  # what it looked at is not asked for any more
    give(page, image_bytes(5))
    wait_for(page, ".result", 3)
    assert page.locator(".result").first.locator("img").count() == 1


def test_it_fits_a_phone_and_names_are_text(page):
    name = "a_name_without_any_break_" * 8 + "<img src=x onerror=alert(1)>.png"
    give(page, image_bytes(), name)
    wait_for(page, ".result")
    assert name in page.locator("figcaption").first.inner_text()
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    sizes = page.locator("button:visible").evaluate_all(
        "all => all.map(b => b.getBoundingClientRect().height)"
    )
    assert min(sizes) >= 44  # what a finger needs


def test_the_verdict_is_large_and_up_to_five_others_follow_by_probability(page):
    """A JavaScript object orders keys that are numbers first."""
    others = {f"class {i}": (9 - i) / 100 for i in range(6)} | {"3": 0.02, "1": 0.01}
    fulfil(page, "**/predict?*", predicted("10", {"10": 0.6, **others}))
    give(page, b"x")
    wait_for(page, ".verdict")
    assert page.locator(".verdict").inner_text() == "10"
    names = page.locator(".bars > span").all_inner_texts()[::2]
    assert names == [f"class {i}" for i in range(5)]
    sizes = page.evaluate(
        """() => [".verdict", ".bars span"].map(
          name => parseFloat(getComputedStyle(document.querySelector(name)).fontSize))"""
    )
    assert sizes[0] > 2 * sizes[1]


def test_of_a_thing_and_its_absence_it_asks_for_the_thing_by_its_threshold(page):
    known = {"class_names": ["hotdog", "not-hotdog"]}
    fulfil(page, "**/model", {**known, "threshold": {"label": "hotdog", "at_least": 0.2509}})
    answer = predicted("not-hotdog", {"not-hotdog": 0.9, "hotdog": 0.1})
    fulfil(page, "**/predict?*", answer)
    page.reload()
    page.get_by_text("at least 25.1 %").wait_for(timeout=20_000)
    give(page, b"x")
    wait_for(page, ".verdict")
    assert page.locator("h1").inner_text() == "Is it a hotdog, or not?"
    assert page.locator(".verdict").inner_text() == "not hotdog"


def test_a_token_is_asked_for_and_then_used(visitor, predictor):
    page = visitor.open(visitor.serve(make_app(Service(predictor, LIMITS, 4), "word", "127.0.0.1")))
    page.locator("#token").fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_text("a token is needed").wait_for(timeout=20_000)
    page.locator("#token").fill("word")
    page.keyboard.press("Enter")
    page.locator("#token-form").wait_for(state="hidden", timeout=20_000)
    give(page, image_bytes())
    wait_for(page, ".verdict")


@pytest.mark.parametrize("status", [200, 502])
def test_a_page_of_a_proxy_and_a_service_that_is_gone_are_plain_words(page, status):
    page.route(
        "**/predict?*",
        lambda route: route.fulfill(status=status, body="<!DOCTYPE html>"),
    )
    give(page, b"x")
    wait_for(page, ".bad")
    text = page.locator(".bad").inner_text()
    assert f"status {status}" in text and "DOCTYPE" not in text
    page.unroute("**/predict?*")
    page.route("**/predict?*", lambda route: route.abort())
    give(page, b"x")
    page.get_by_text("does not answer").wait_for(timeout=20_000)


def test_a_folder_is_described_as_what_it_is(page, tmp_path):
    files = {"items": [], "files": [str(tmp_path)], "dragOperationsMask": 1}
    session = page.context.new_cdp_session(page)
    message = page.get_by_text("Is it a folder")
    for _ in range(20):  # Chromium loses a drag at times
        for kind in ("dragEnter", "dragOver", "drop"):
            drag = {"type": kind, "x": 100, "y": 200, "data": files}
            session.send("Input.dispatchDragEvent", drag)
        page.wait_for_timeout(1_000)
        if message.is_visible():
            return
    pytest.fail("the page does not say what was dropped")


def test_without_javascript_the_page_says_so(visitor, address):
    page = visitor.open(address, java_script_enabled=False)
    assert "needs JavaScript" in page.locator("body").inner_text()
