"""A data folder and the arguments of a fit of one second."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
from fit_words import QUICK
from small_fits import write_checkpoints


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments of a fit that takes a second; the test is in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return copy.deepcopy(QUICK)


@pytest.fixture(scope="session")
def trained(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoints(tmp_path_factory.mktemp("trained"), colours, "mobilenet_v3_small", 32)


@pytest.fixture
def calibrated(trained: Path, tmp_path: Path) -> Path:
    return shutil.copy(trained / "calibrated.ckpt", tmp_path / "some.ckpt")
