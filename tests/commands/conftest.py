"""A finished run that several tests resume or read."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from colours import QUICKEST

from finetune.commands.lightning_cli import run_lightning
from finetune.runs import run_lock


@pytest.fixture(scope="session")
def untested_run(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one epoch that was not tested; to be read only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("untested"))
        run_lightning(["fit", "--data.root", str(colours), *QUICKEST, "--test_after_fit", "false"])
        run_lock.release()
        return Path("runs/fit/version_0").absolute()


@pytest.fixture
def run_to_go_on(untested_run: Path, cli: Callable[..., None], tmp_path: Path) -> Path:
    """A copy of such a run, where `finetune` in this process would have made it."""
    return shutil.copytree(untested_run, tmp_path / "runs/fit/version_0")
