"""A run that tests of several modules write into."""

import pytest

from finetune.runs.folder import Run


@pytest.fixture
def run(tmp_path) -> Run:
    run = Run(tmp_path, "fit")
    run.choose()
    return run
