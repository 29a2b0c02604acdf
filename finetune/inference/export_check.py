"""Verifies an exported file against its checkpoint: the same images must give the same probabilities."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import torch

from finetune.inference.onnx_session import open_session
from finetune.inference.openvino_model import open_model
from finetune.inference.predictor import Predictor

# Largest difference of a probability that is accepted. Rounding in float32 causes 1e-8 to 5e-6.
MAX_DIFFERENCE = 1e-4
# If probabilities differ by less, a different class is a tie: rounding in float32 decides.
_TIE = 1e-6
# Idle threads of torch and onnxruntime spin for a while. The first call after one of the other library took 2.5 times
# as long (ResNet-18 at 128 pixels, two cores). So each library makes several calls in a row, and the last is timed.
_ROUNDS = 7
_CALLS = 5

_NUM_CUT = 4  # images of any size that are held in memory and cut to pieces: they may be large
# From images (N, h, w, 3) uint8, prepared or not, to probabilities (N, K).
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
    if path.suffix == ".xml":
        return open_model(str(path), "probabilities")
    if path.suffix == ".pt2":
        program = torch.export.load(path).module()  # written by ourselves, a moment ago
        return lambda images: program(torch.from_numpy(images))[0].detach().numpy()
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


def compare_any_size(
    predictor: Predictor,
    reference: PredictionFunction,
    run: PredictionFunction,
    images: Iterable[np.ndarray],
) -> Agreement:
    """Compare two runs on images (H, W, 3) of any sizes.

    The first images are also compared as tiny, wide, tall and large pieces, and in batches of two.

    Args:
        predictor: Gives the predicted class for probabilities.
        reference: Computes the expected probabilities.
        run: Computes the probabilities to verify.
        images: Any number of images. Only the first few are held in memory; the others one at a time.
    """
    rest = iter(images)
    first = list(islice(rest, _NUM_CUT))
    pieces = (piece for image in first for piece in _pieces(image))
    singles = (image[None] for image in chain(first, pieces, rest))
    pairs = (np.stack([image, image[::-1]]) for image in first)
    num = 0
    largest = 0.0
    num_other = 0
    for batch in chain(singles, pairs):
        difference, others = _differences(predictor, reference(batch), run(batch))
        num += len(batch)
        largest = max(largest, difference)
        num_other += others
    return Agreement(num, largest, num_other, time_in_turns(reference, run, first))


def _pieces(image: np.ndarray) -> Iterator[np.ndarray]:
    """Yield parts of an image (H, W, 3), and a mosaic of four copies of it."""
    height, width = image.shape[:2]
    for rows, columns in (
        (1, 1),
        (3, width),
        (height, 2),
        (-(-height // 3), -(-width // 2)),
        (height, -(-width // 7)),
    ):
        yield np.ascontiguousarray(image[-rows:, -columns:])
    yield np.tile(image, (2, 2, 1))


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
