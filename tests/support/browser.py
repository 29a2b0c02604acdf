"""Chromium, if it is installed: a page as scripts and screens see it."""

import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

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
def chromium() -> Iterator[Browser]:
    """Yield a browser that scripts of playwright drive."""
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
