"""Fixtures of the pages that a browser shows."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from browser import Visitor, chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def visitor(browser: "Browser") -> Iterator[Visitor]:
    visitor = Visitor(browser)
    yield visitor
    visitor.close()
