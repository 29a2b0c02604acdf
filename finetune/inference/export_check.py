"""Verifies an exported file against its checkpoint: the same images must give the same probabilities."""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from finetune.inference.onnx_session import open_session
from finetune.inference.predictor import Predictor

# Largest difference of a probability that is accepted. Rounding in float32 causes 1e-8 to 5e-6.
MAX_DIFFERENCE = 1e-4
# If probabilities differ by less, a different class is a tie: rounding in float32 decides.
_TIE = 1e-6
# Idle threads of torch and onnxruntime spin for a while. The first call after one of the other library took 2.5 times
# as long (ResNet-18 at 128 pixels, two cores). So each library makes several calls in a row, and the last is timed.
_ROUNDS = 7
_CALLS = 5

# From prepared images (N, h, w, 3) uint8 to probabilities (N, K).
PredictionFunction = Callable[[np.ndarray], np.ndarray]


def drawn_image(seed: int, size: int = 96) -> np.ndarray:
    """Draw a synthetic image (size, size, 3): ellipses on a smooth background, in random colours, with noise."""
    rng = np.random.default_rng(seed)
    background = rng.integers(0, 256, (4, 4, 3), np.uint8)
    image = cv2.resize(background, (size, size), interpolation=cv2.INTER_CUBIC)
    for _ in range(rng.integers(1, 6)):
        centre = rng.integers(0, size, 2).tolist()
        axes = rng.integers(4, size // 2, 2).tolist()
        angle = float(rng.uniform(0, 180))
        colour = rng.integers(0, 256, 3).tolist()
        cv2.ellipse(image, centre, axes, angle, 0, 360, colour, cv2.FILLED)
    noisy = rng.normal(image, rng.uniform(1, 7))
    return np.clip(noisy, 0, 255).astype(np.uint8)


class Agreement(NamedTuple):
    """The result of a comparison of two runs on the same images.

    Attributes:
        num_images: Number of images.
        largest: Largest difference of a probability.
        num_other: Number of images with different predicted classes, without ties.
        milliseconds: Median time for one image, of the checkpoint and of the file.
    """

    num_images: int
    largest: float
    num_other: int
    milliseconds: tuple[float, float]

    @property
    def is_good(self) -> bool:
        return self.largest <= MAX_DIFFERENCE and self.num_other == 0


def load_exported(path: Path) -> PredictionFunction:
    """Load an exported file as another program would, and return the function that it computes."""
    if path.suffix == ".onnx":
        session = open_session(str(path))
        return lambda images: session.run(["probabilities"], {"images": images})[0]
    assert path.suffix == ".safetensors", f"no way to load a {path.suffix}"
    return Predictor(path).classify


def compare_prepared(
    predictor: Predictor, run: PredictionFunction, images: np.ndarray
) -> Agreement:
    """Compare a file with the checkpoint on prepared images (N, h, w, 3), in batches of 1, 2 and N."""
    expected = predictor.classify(images)
    differences = [
        _differences(predictor, expected[:num], run(images[:num])) for num in (1, 2, len(images))
    ]
    largest, num_other = (max(values) for values in zip(*differences, strict=True))
    milliseconds = time_in_turns(predictor.classify, run, images)
    return Agreement(len(images), largest, num_other, milliseconds)


def _differences(
    predictor: Predictor, expected: np.ndarray, actual: np.ndarray
) -> tuple[float, int]:
    """Return the largest difference of a probability, and how many images have different classes, without ties."""
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return float("inf"), len(expected)
    differences = np.abs(actual - expected).max(axis=1)
    expected_classes = predictor.decide(expected.astype(np.float64))
    is_other = predictor.decide(actual.astype(np.float64)) != expected_classes
    if is_other.ndim == 2:  # several labels
        is_other = is_other.any(axis=1)
    return float(differences.max()), int((is_other & (differences > _TIE)).sum())


def time_in_turns(
    first: PredictionFunction, second: PredictionFunction, images: Sequence[np.ndarray] | np.ndarray
) -> tuple[float, float]:
    """Return the median milliseconds of two runs for one image (h, w, 3).

    The runs take turns, so that other load on the machine affects both.
    """
    milliseconds: tuple[list[float], list[float]] = [], []
    for i in range(_ROUNDS):
        image = images[i % len(images)][None]
        for run, taken in zip((first, second), milliseconds, strict=True):
            for _ in range(_CALLS - 1):
                run(image)
            began = time.perf_counter()
            run(image)
            taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(milliseconds[0]), statistics.median(milliseconds[1])
