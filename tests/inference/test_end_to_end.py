"""Exported networks from pixels to probabilities."""

import numpy as np
import torch

from finetune.inference.end_to_end import EndToEnd
from finetune.inference.predictor import Predictor


def test_it_says_what_the_predictor_says(calibrated):
    predictor = Predictor(calibrated)
    model = predictor.model
    module = EndToEnd(model, predictor.calibration).eval()
    images = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), np.uint8)
    with torch.no_grad():
        probabilities, logits = module(torch.from_numpy(images))
        own = model(torch.from_numpy(images).permute(0, 3, 1, 2))
    # float32
    np.testing.assert_allclose(probabilities, predictor.classify(images), rtol=0, atol=1e-6)
    torch.testing.assert_close(logits, own)  # without the temperature
    # the control
    assert np.abs(logits.softmax(dim=1).numpy() - predictor.classify(images)).max() > 1e-3
