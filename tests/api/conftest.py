"""A data folder and the arguments of a fit of one second."""

import copy
import gc
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fit_words import QUICK
from small_fits import write_checkpoints

from finetune.api.borrowed_process import preserved_process


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments of a fit that takes a second; the test is in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return copy.deepcopy(QUICK)


@pytest.fixture(scope="module", autouse=True)
def short_collections() -> Iterator[None]:
    """Leave what exists out of the garbage collection at the end of each restored process, which it would dominate.

    A process is restored once before: what that imports is there in each test.
    """
    with preserved_process():
        pass
    gc.freeze()
    yield


@pytest.fixture(scope="session")
def trained(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoints(tmp_path_factory.mktemp("trained"), colours, "mobilenet_v3_small", 32)


@pytest.fixture
def calibrated(trained: Path, tmp_path: Path) -> Path:
    return shutil.copy(trained / "calibrated.ckpt", tmp_path / "some.ckpt")
