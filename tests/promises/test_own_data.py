"""A data class of the user, with arguments and defaults of its own: it fits, continues, is tested, has folds."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from colours import QUICKEST

from finetune import cli as command_line
from finetune.fitting import several_fits as folds
from finetune.runs import run_lock

MODULE = """
from finetune import ImageFolderData

class Photos(ImageFolderData):
    def __init__(self, root, flavour="sweet", num_folds=None, fold=None, group_by=None):
        super().__init__(
            root, batch_size=16, image_size=28, num_workers=0, num_folds=num_folds, fold=fold
        )
        self.save_hyperparameters()
"""
OF_DATA = ("--data.image_size", "--data.batch_size", "--data.num_workers")
REST = [word for i, word in enumerate(QUICKEST) if not {word, QUICKEST[i - 1]} & {*OF_DATA}]


@pytest.fixture
def fit(
    cli: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., None]]:
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)

    def run(*words: object) -> None:
        try:
            cli("fit", *words)
        finally:
            run_lock.release()

    yield run
    sys.modules.pop("mine", None)


def test_a_fit_on_data_of_a_users_class_continues_and_is_tested(fit, cli, colours, tmp_path):
    data = (colours, "--data", "mine.Photos")
    fit(*data, *REST, "--data.flavour", "sour")
    run = tmp_path / "runs/fit/version_0"
    cli("test", run, "--data", "mine.Photos", "--trainer.accelerator", "cpu")
    first, second = (
        json.loads((tmp_path / f"runs/{name}/version_0/test.json").read_text())
        for name in ("fit", "test")
    )
    assert first["confusion_matrix"] == second["confusion_matrix"]
    # importing a class runs its code: the user has to name it
    with pytest.raises(ValueError, match=r"mine\.Photos.*--data"):
        fit("--resume", run, "--epochs", 2)
    fit(*data, "--resume", run, "--epochs", 2)
    assert len((run / "metrics.csv").read_text().splitlines()) == 3


def test_folds_of_data_of_a_users_class_are_tested_together(fit, colours, tmp_path, monkeypatch):
    def start(command: list[str], **_: object) -> int:
        command_line.run(command)
        return 0

    monkeypatch.setattr(folds, "start_command", start)
    monkeypatch.setattr(folds, "wait_for", lambda code: code)
    fit(colours, "--data", "mine.Photos", *REST, "--folds", 2)
    result = json.loads((tmp_path / "runs/fit/version_0/test.json").read_text())
    assert sum(map(sum, result["test_folder"]["confusion_matrix"])) == 30
