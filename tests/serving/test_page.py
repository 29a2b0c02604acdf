"""The page in a browser: images dropped, pasted and chosen, by mouse and by keyboard alone."""

import base64
import json
import threading
import time

import pytest
import uvicorn
from browser import chromium, needs_browser
from playwright.sync_api import FileChooser, Page

from finetune.serving.app import make_app
from finetune.serving.http_server import listen
from finetune.serving.service import Service
from finetune.serving.uploads import Limits

pytestmark = [needs_browser, pytest.mark.slow]

_DROP = """([name, type, content, event]) => {
  const bytes = Uint8Array.from(atob(content), c => c.charCodeAt(0)), moved = new DataTransfer();
  moved.items.add(new File([bytes], name, {type}));
  const given = event === "paste" ? new ClipboardEvent("paste", {clipboardData: moved, bubbles: true, cancelable: true})
    : new DragEvent("drop", {dataTransfer: moved, bubbles: true, cancelable: true});
  document.getElementById("drop").dispatchEvent(given);
}"""


@pytest.fixture(scope="module")
def serve(predictor):
    """Start a service in a thread; returns its address."""
    started = []

    def begin(token: str | None = None) -> str:
        service = Service(predictor, Limits(200_000, 4, 10_000, 8, 20), 4)
        listener = listen("127.0.0.1", 0)
        config = uvicorn.Config(
            make_app(service, token, "127.0.0.1"), log_config=None, ws="none", lifespan="on"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        started.append((server, thread, listener))
        while not server.started:
            time.sleep(0.01)
        return f"http://127.0.0.1:{listener.getsockname()[1]}/"

    yield begin
    for server, thread, listener in started:
        server.should_exit = True
        thread.join(timeout=20)
        listener.close()


@pytest.fixture(scope="module")
def address(serve):
    return serve()


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser, address):
    context = browser.new_context(viewport={"width": 390, "height": 800})
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "console",
        lambda message: faults.append(message.text) if "Content Security" in message.text else None,
    )
    page.goto(address)
    yield page
    assert not faults
    context.close()


def give(
    page: Page, content: bytes, name: str = "a.png", kind: str = "image/png", event: str = "drop"
) -> None:
    page.evaluate(_DROP, [name, kind, base64.b64encode(content).decode(), event])


def verdict_of(predictor, content: bytes) -> str:
    from finetune.data.decode import decode

    return predictor.class_names[int(predictor([decode(content)])[0].argmax())]


@pytest.mark.parametrize("event", ["drop", "paste"])
def test_an_image_gets_its_verdict(page, predictor, png_image, event):
    give(page, png_image(), event=event)
    result = page.locator(".result")
    result.wait_for(timeout=20_000)
    assert result.locator(".verdict").inner_text() == verdict_of(predictor, png_image())
    assert result.locator("img").count() == 1  # maps of this small network are too coarse to show
    assert "No heat map" in page.locator("#no-map").inner_text()
    assert result.locator(".bars span").count() == 2 * 2  # the other two of three classes
    assert "%" in result.inner_text() and page.locator("#status").inner_text() == ""


def test_several_are_answered_each_and_a_bad_one_says_why(page, png_image):
    for number in range(2):
        give(page, png_image(number), f"{number}.png")
    give(page, b"hello", "note.txt", "text/plain")
    give(page, bytes(200_001), "large.png")
    page.locator(".result").nth(3).wait_for(timeout=20_000)
    assert page.locator(".verdict").count() == 2
    bad = page.locator(".bad").all_inner_texts()
    assert any(text.startswith("note.txt: cannot be decoded: not a JPEG, PNG") for text in bad)
    assert any("large.png: too large: 200,001 bytes, the limit is 200,000" in text for text in bad)


def test_the_keyboard_is_enough(page, png_image):
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
        [{"name": f"{i}.png", "mimeType": "image/png", "buffer": png_image(i)} for i in range(2)]
    )
    page.locator(".result").nth(1).wait_for(timeout=20_000)
    for name in ("photograph", "looked-at"):
        page.keyboard.press("Tab")
        assert page.evaluate("() => document.activeElement.id") == name
    page.keyboard.press("Space")  # what it looked at is not asked for any more
    give(page, png_image(5))
    page.locator(".result").nth(2).wait_for(timeout=20_000)
    assert page.locator(".result").first.locator("img").count() == 1


def test_it_fits_a_phone(page, png_image):
    give(page, png_image(), "a_name_without_any_break_" * 8 + ".png")
    page.locator(".result").wait_for(timeout=20_000)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    sizes = page.locator("button:visible").evaluate_all(
        "all => all.map(b => b.getBoundingClientRect().height)"
    )
    assert min(sizes) >= 44  # what a finger needs


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_can_be_read(browser, address, png_image, scheme):
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    page.goto(address)
    give(page, png_image())
    page.locator(".verdict").wait_for(timeout=20_000)
    contrast = page.evaluate(
        """() => {
          const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
          const light = text => {
            const [r, g, b] = text.match(/[\\d.]+/g).map(v => linear(v / 255));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const style = name => getComputedStyle(document.querySelector(name));
          const a = light(style(".verdict").color), b = light(style(".result").backgroundColor);
          return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        }"""
    )
    is_dark = (
        page.evaluate("() => getComputedStyle(document.documentElement).backgroundColor")
        == "rgb(23, 23, 22)"
    )
    assert contrast > 7 and is_dark == (scheme == "dark")
    context.close()


def test_of_a_thing_and_its_absence_it_asks_for_the_thing(page, predictor):
    known = {"class_names": ["hotdog", "not-hotdog"]}
    page.route(
        "**/model",
        lambda route: route.fulfill(body=json.dumps(known), content_type="application/json"),
    )
    one = {
        "name": "a",
        "label": "not-hotdog",
        "probability": 0.9,
        "probabilities": {"not-hotdog": 0.9, "hotdog": 0.1},
    }
    page.route("**/predict?*", lambda route: route.fulfill(body=json.dumps({"predictions": [one]})))
    page.reload()
    give(page, b"x")
    page.locator(".verdict").wait_for(timeout=20_000)
    assert page.locator("h1").inner_text() == "Is it a hotdog, or not?"
    assert page.locator(".verdict").inner_text() == "not hotdog"


def test_another_model_at_the_same_address_is_introduced(page):
    """A restarted service may have other classes: fewer than the selected number, with other names."""
    models = [["a", "b", "c", "d", "e", "f", "g"], ["hotdog", "not-hotdog"], ["x", "y", "z"]]
    asked: list[str] = []

    def predict(route):
        asked.append(route.request.url)
        one = {"name": "a", "label": names[0], "probability": 1, "probabilities": {names[0]: 1}}
        route.fulfill(body=json.dumps({"predictions": [one]}))

    page.route("**/model", lambda route: route.fulfill(body=json.dumps({"class_names": names})))
    page.route("**/predict?*", predict)
    first = page.locator("h1").inner_text(), page.title()
    seen = []
    for count, names in enumerate(models):  # noqa: B007 the routes read it
        give(page, b"x")
        page.locator(".verdict").nth(count).wait_for(timeout=20_000)
        seen.append(
            (page.locator("h1").inner_text(), page.title(), page.locator("#classes").inner_text())
        )
    assert seen[0] == (*first, "Classes: a, b, c, d, e, f, g.") and seen[2] == (
        *first,
        "Classes: x, y, z.",
    )
    assert seen[1] == ("Is it a hotdog, or not?", "hotdog, or not hotdog?", "")
    assert ["top_k" in url for url in asked] == [True, False, False]


def test_a_threshold_is_reported(page):
    """Otherwise the page would show the less probable of two classes without a reason."""
    known = {
        "class_names": ["hotdog", "not-hotdog"],
        "threshold": {"label": "hotdog", "at_least": 0.2509},
    }
    page.route("**/model", lambda route: route.fulfill(body=json.dumps(known)))
    page.reload()
    page.get_by_text("It predicts hotdog if its probability is at least 25.1 %.").wait_for(
        timeout=20_000
    )


def test_names_are_text_and_never_markup(page, png_image):
    give(page, png_image(), "<img src=x onerror=alert(1)>.png")
    page.locator(".result").wait_for(timeout=20_000)
    assert "<img src=x onerror=alert(1)>.png" in page.locator("figcaption").first.inner_text()


def test_a_token_is_asked_for_and_then_used(serve, browser, png_image):
    context = browser.new_context()
    page = context.new_page()
    page.goto(serve(token="word"))
    page.locator("#token").fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_text("a token is needed").wait_for(timeout=20_000)
    page.locator("#token").fill("word")
    page.keyboard.press("Enter")
    page.locator("#token-form").wait_for(state="hidden", timeout=20_000)
    give(page, png_image())
    page.locator(".verdict").wait_for(timeout=20_000)
    context.close()


def test_a_folder_is_described_as_what_it_is(page, tmp_path):
    at = {
        "x": 100,
        "y": 200,
        "data": {"items": [], "files": [str(tmp_path)], "dragOperationsMask": 1},
    }
    session = page.context.new_cdp_session(page)
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, **at})
    page.get_by_text("it cannot be read. Is it a folder").wait_for(timeout=20_000)


def test_the_most_probable_comes_first_whatever_it_is_called(page):
    """A JavaScript object orders keys that are numbers first."""
    one = {
        "name": "a",
        "label": "10",
        "probability": 0.7,
        "probabilities": {"10": 0.7, "b": 0.2, "3": 0.1},
    }
    page.route("**/predict?*", lambda route: route.fulfill(body=json.dumps({"predictions": [one]})))
    give(page, b"x")
    page.locator(".verdict").wait_for(timeout=20_000)
    assert page.locator(".verdict").inner_text() == "10"
    assert page.locator(".bars > span").all_inner_texts()[::2] == ["b", "3"]


def test_the_answer_is_large_and_up_to_five_others_follow(page):
    others = {f"class {i}": (9 - i) / 100 for i in range(8)}
    one = {
        "name": "a",
        "label": "cat",
        "probability": 0.5,
        "probabilities": {"cat": 0.5, **others},
        "looked_at": None,
    }
    page.route("**/predict?*", lambda route: route.fulfill(body=json.dumps({"predictions": [one]})))
    give(page, b"x")
    page.locator(".verdict").wait_for(timeout=20_000)
    names = page.locator(".bars > span").all_inner_texts()[::2]
    assert names == [f"class {i}" for i in range(5)]
    sizes = page.evaluate(
        """() => [".verdict", ".bars span"].map(
          name => parseFloat(getComputedStyle(document.querySelector(name)).fontSize))"""
    )
    assert sizes[0] > 2 * sizes[1]


@pytest.mark.parametrize("status", [200, 502])
def test_a_page_of_a_proxy_is_described_in_plain_words(page, status):
    page.route(
        "**/predict?*",
        lambda route: route.fulfill(
            status=status, body="<!DOCTYPE html>", content_type="text/html"
        ),
    )
    give(page, b"x")
    page.locator(".bad").wait_for(timeout=20_000)
    text = page.locator(".bad").inner_text()
    assert f"unexpected answer (status {status})" in text and "DOCTYPE" not in text


def test_a_web_page_saved_as_an_image_is_named_as_one(page):
    give(page, b"<!DOCTYPE html><html></html>", "cat.jpg")
    page.locator(".bad").wait_for(timeout=20_000)
    text = page.locator(".bad").inner_text()
    assert "it is a web page" in text and "DOCTYPE" not in text


def test_without_scripts_it_says_so(browser, address):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    assert "needs JavaScript" in page.locator("body").inner_text()
    context.close()


def test_a_service_that_is_gone_is_reported(page, png_image):
    page.route("**/predict?*", lambda route: route.abort())
    give(page, png_image())
    page.get_by_text("The service does not answer").wait_for(timeout=20_000)
