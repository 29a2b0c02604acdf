"""TensorBoard's files in the run's folder: the values of steps.csv, and the config once."""

from pathlib import Path

import pytest
from logged_fits import RUN, fit_with, hyperparameters, scalars, settings, steps

from finetune.runs.folder import Run
from finetune.runs.tensorboard_logger import TensorBoardLogger

LOGGER = ("--logger", "tensorboard")


@pytest.mark.slow
def test_a_fit_logs_what_steps_csv_has_and_continues_there(colours, cli, capfd):
    lines = fit_with(colours, capfd, *LOGGER)
    assert scalars() == pytest.approx(steps(), rel=1e-6)  # float32
    assert {name for name, _ in scalars()} >= {"train/loss", "val/accuracy", "test/accuracy"}
    assert hyperparameters() == [settings()]
    files = RUN / "tensorboard"
    assert len(list(files.iterdir())) == 1  # TensorBoard misorders several of one second
    first = settings()
    fit_with(colours, capfd, *LOGGER, "--resume", "--trainer.max_epochs", "2")
    assert scalars() == pytest.approx(steps(), rel=1e-6)
    assert len(list(files.iterdir())) == 2
    assert max(step for _, step in steps()) == 8
    assert hyperparameters() == [first]
    assert lines == fit_with(colours, capfd) and not (RUN.parent / "version_1/tensorboard").exists()


def test_a_place_of_ones_own_has_a_folder_for_each_run(tmp_path):
    def logged(run: Run, **given) -> TensorBoardLogger:
        logger = TensorBoardLogger(str(tmp_path / "board"), **given)
        logger.attach(run, "TensorBoardLogger")
        logger.log_metrics({"a": 1.0}, 0)
        logger.finalize("success")
        return logger

    first, second = Run(tmp_path, "fit"), Run(tmp_path, "fit")
    folders = [Path(logged(run).log_dir) for run in (first, second, first)]
    assert folders == [
        tmp_path / "board/finetune" / name for name in ("version_0", "version_1", "version_0")
    ]
    assert (
        Path(logged(Run(tmp_path, "fit"), name="x", version="y").log_dir) == tmp_path / "board/x/y"
    )
