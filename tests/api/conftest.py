"""A folder to fit in, and what a fit of a second is told."""

from pathlib import Path
from typing import Any

import pytest

QUICK: dict[str, Any] = {
    **{"epochs": 1, "size": 32, "batch": 16, "workers": 0, "weights": None, "backbone": "mobilenet_v3_small"},
    **{"precision": "32-true", "devices": 1},
}


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments of a fit that takes a second; the test is in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return {**QUICK, "options": {"report": False, "trainer.accelerator": "cpu"}}
