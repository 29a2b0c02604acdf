"""The probabilities of images by a checkpoint or an exported file."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from finetune.inference.predictor import Predictor


def probabilities(model: Predictor | Path | str, images: Sequence[np.ndarray]) -> np.ndarray:
    """Return the probability of each class, (N, K), for N images (H, W, 3) of any sizes."""
    predictor = model if isinstance(model, Predictor) else Predictor(model)
    return predictor.classify(np.stack([predictor.prepare(image) for image in images]))
