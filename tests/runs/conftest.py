"""A run that tests of several modules write into."""

import os
from collections.abc import Iterator

import pytest

from finetune.runs.folder import Run


@pytest.fixture
def run(tmp_path) -> Run:
    run = Run(tmp_path, "fit")
    run.choose()
    return run


@pytest.fixture
def environment() -> Iterator[None]:
    """Put environment variables back."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
