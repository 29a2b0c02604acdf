"""A checkpoint to answer with."""

import pytest
import torch
from small_fits import SMALL, data, fit

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
    known = torch.load(checkpoint, weights_only=True)
    generator, state = torch.Generator().manual_seed(0), known["state_dict"]
    for name, value in state.items():
        if name.startswith("network.") and value.dim() > 1:
            state[name] = torch.randn(value.shape, generator=generator) * (2 / value[0].numel()) ** 0.5
    known["finetune"]["calibration"] = {"temperature": 0.25, "num_pictures": 7, "threshold": None}
    torch.save(known, checkpoint)
    return checkpoint
