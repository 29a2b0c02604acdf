"""Chromium, if it is installed: a page as scripts and screens see it."""

import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from starlette.types import ASGIApp

from finetune.serving.http_server import listen

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


def _run(folder: Path, *options: str) -> str:
    common = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    )
    profile = f"--user-data-dir={folder / 'chromium'}"
    command = [str(CHROMIUM), *common, profile, "--virtual-time-budget=3000", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@contextmanager
def chromium() -> Iterator["Browser"]:
    """Yield a browser that scripts of playwright drive."""
    from playwright.sync_api import sync_playwright  # its import takes a second

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def scroll_widths(pages: Iterable[tuple[str, int]], folder: Path) -> list[int]:
    """Return how wide each page is in a window of this many pixels; more than these and it scrolls sideways."""
    file = folder / "page.html"
    found = []
    with chromium() as browser:
        for page, width in pages:
            file.write_text(page, "utf-8")
            window = browser.new_page(viewport={"width": width, "height": 800})
            window.goto(file.as_uri())
            found.append(int(window.evaluate("() => document.documentElement.scrollWidth")))
            window.close()
    return found


def evaluate(page: str, expression: str, folder: Path, width: int, media: str = "screen") -> Any:
    """Return the value of a JavaScript expression in a page, in a window of this width, on a screen or in print."""
    file = folder / "evaluated.html"
    file.write_text(page, "utf-8")
    with chromium() as browser:
        window = browser.new_page(viewport={"width": width, "height": 800})
        window.emulate_media(media=media)  # type: ignore[arg-type]
        window.goto(file.as_uri())
        return window.evaluate(expression)


def dom_after(page: str, script: str, folder: Path) -> str:
    """Return the page's document after a script has run at its end."""
    file = folder / "scripted.html"
    file.write_text(page.replace("</body>", f"<script>{script}</script></body>"), "utf-8")
    return _run(folder, "--dump-dom", file.as_uri())


class Visitor:
    """A page of an application that is served in a thread, and what went wrong on it.

    A page that asks another address, breaks its own policy or has an error in a script fails its test in the end.
    """

    def __init__(self, browser: "Browser") -> None:
        self.browser = browser
        self.faults: list[str] = []
        self._stack = ExitStack()

    def serve(self, app: ASGIApp) -> str:
        """Serve an application until the end of the test, and return its address."""
        listener = self._stack.enter_context(listen("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none", lifespan="on"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        self._stack.callback(thread.join, timeout=20)
        self._stack.callback(setattr, server, "should_exit", True)
        while not server.started:
            time.sleep(0.01)
        return f"http://127.0.0.1:{listener.getsockname()[1]}/"

    def open(self, address: str, **options: Any) -> "Page":
        """Open an address in a window of its own, as with `viewport` or `color_scheme`."""
        context = self.browser.new_context(**options)
        self._stack.callback(context.close)
        page = context.new_page()
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", lambda message: self._check(message.text, "Content Security"))
        page.on("request", lambda request: self._check_address(request.url, address))
        page.goto(address)
        return page

    def close(self) -> None:
        self._stack.close()
        assert not self.faults

    def _check(self, text: str, fault: str) -> None:
        if fault in text:
            self.faults.append(text)

    def _check_address(self, url: str, address: str) -> None:
        if not url.startswith((address, "data:", "blob:")):
            self.faults.append(f"asked for {url}")
