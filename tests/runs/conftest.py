"""A run that tests of several modules write into."""

import os
from collections.abc import Iterator

import pytest

from finetune.runs import comparison, html_report
from finetune.runs.folder import Run


@pytest.fixture
def run(tmp_path) -> Run:
    run = Run(tmp_path, "fit")
    run.choose()
    return run


@pytest.fixture
def without_charts(monkeypatch) -> None:
    """Leave the charts of pages out: to draw one takes a tenth of a second."""
    monkeypatch.setattr(html_report, "curves", lambda *_, **__: "")
    monkeypatch.setattr(html_report, "reliability_chart", lambda *_: "")
    monkeypatch.setattr(comparison, "curves", lambda *_, **__: "")


@pytest.fixture
def environment() -> Iterator[None]:
    """Put environment variables back."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
