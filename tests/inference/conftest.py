"""A checkpoint to answer with."""

import shutil
from pathlib import Path

import pytest
import torch
from small_fits import data, fit, scramble

from finetune import Classifier
from finetune.inference.predictor import Predictor


def write_checkpoints(folder: Path, colours: Path, backbone: str, image_size: int) -> Path:
    """Write a checkpoint, and the same whose probabilities have a temperature, and which tells any images apart."""
    images = data(colours, resize="squash", image_size=image_size)
    torch.manual_seed(0)
    fit(Classifier(images.class_names, backbone, weights=None), images).save_checkpoint(folder / "plain.ckpt")
    shutil.copy(folder / "plain.ckpt", folder / "calibrated.ckpt")
    scramble(folder / "calibrated.ckpt")
    known = torch.load(folder / "calibrated.ckpt", weights_only=True)
    known["finetune"]["calibration"] = {"temperature": 0.25, "num_pictures": 7, "threshold": None}
    torch.save(known, folder / "calibrated.ckpt")
    return folder


@pytest.fixture(scope="session")
def trained(colours, tmp_path_factory) -> Path:
    return write_checkpoints(tmp_path_factory.mktemp("trained"), colours, "mobilenet_v3_small", 32)


@pytest.fixture(scope="session")
def small(colours, tmp_path_factory) -> Path:
    """The calibrated checkpoint of a network that is exported in a fifth of the time."""
    return write_checkpoints(tmp_path_factory.mktemp("small"), colours, "small_cnn", 28) / "calibrated.ckpt"


@pytest.fixture
def checkpoint(trained, tmp_path):
    return shutil.copy(trained / "plain.ckpt", tmp_path / "some.ckpt")


@pytest.fixture
def calibrated(trained, tmp_path):
    return shutil.copy(trained / "calibrated.ckpt", tmp_path / "some.ckpt")


@pytest.fixture
def predictor(calibrated) -> Predictor:
    return Predictor(calibrated)
