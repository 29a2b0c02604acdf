"""A checkpoint to answer with."""

import pytest
import torch
from small_fits import SMALL, data, fit, scramble

from finetune import Classifier


@pytest.fixture
def checkpoint(colours, tmp_path):
    pictures = data(colours, resize="squash")
    torch.manual_seed(0)
    fit(Classifier(pictures.class_names, **SMALL), pictures).save_checkpoint(tmp_path / "some.ckpt")
    return tmp_path / "some.ckpt"


@pytest.fixture
def calibrated(checkpoint):
    """The same, whose probabilities have a temperature, and which tells any pictures apart."""
    scramble(checkpoint)
    known = torch.load(checkpoint, weights_only=True)
    known["finetune"]["calibration"] = {"temperature": 0.25, "num_pictures": 7, "threshold": None}
    torch.save(known, checkpoint)
    return checkpoint
