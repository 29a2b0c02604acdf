"""A small checkpoint for predictions."""

import shutil
from pathlib import Path

import pytest
from small_fits import write_checkpoints

from finetune.inference.predictor import Predictor


@pytest.fixture(scope="session")
def trained(colours, tmp_path_factory) -> Path:
    return write_checkpoints(tmp_path_factory.mktemp("trained"), colours, "mobilenet_v3_small", 32)


@pytest.fixture(scope="session")
def small(colours, tmp_path_factory) -> Path:
    """The calibrated checkpoint of a network that is exported in a fifth of the time."""
    return (
        write_checkpoints(tmp_path_factory.mktemp("small"), colours, "small_cnn", 28)
        / "calibrated.ckpt"
    )


@pytest.fixture
def checkpoint(trained, tmp_path):
    return shutil.copy(trained / "plain.ckpt", tmp_path / "some.ckpt")


@pytest.fixture
def calibrated(trained, tmp_path):
    return shutil.copy(trained / "calibrated.ckpt", tmp_path / "some.ckpt")


@pytest.fixture
def predictor(calibrated) -> Predictor:
    return Predictor(calibrated)
