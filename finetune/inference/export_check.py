"""Verifies an exported file against its checkpoint: the same images must give the same probabilities."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from finetune.data.decode import decode
from finetune.data.prediction_paths import files_to_predict
from finetune.data.samplers import SHEET, draw_indices
from finetune.inference.onnx_network import open_session
from finetune.inference.predictor import Predictor

# Largest difference of a probability that is accepted. Rounding in float32 causes 1e-8 to 5e-6.
MAX_DIFFERENCE = 1e-4
# If probabilities differ by less, a different class is a tie: rounding in float32 decides.
_TIE = 1e-6
# Idle threads of torch and onnxruntime spin for a while, so the first calls after one of the other library are slow
# (2.5 times with ResNet-18 at 128 pixels on two cores).
_WARM_UP = 5
_TIMED = 15
_MAX_VERIFIED = 64

# From prepared images (N, h, w, 3) uint8 to probabilities (N, K).
PredictionFunction = Callable[[np.ndarray], np.ndarray]


def images_to_verify(
    predictor: Predictor, verify_on: str | None, num: int = _MAX_VERIFIED
) -> tuple[np.ndarray, str]:
    """Return images on which a file is compared with its checkpoint.

    Args:
        predictor: The checkpoint.
        verify_on: An image, a folder, a glob or a text file of paths; None for synthetic images.
        num: The largest number of images.

    Returns:
        The images as the network takes them, (N, h, w, 3) uint8, and what they are in a message, after their number.
    """
    if verify_on is None:
        drawn = [predictor.prepare(_drawn_image(seed)) for seed in range(num)]
        return np.stack(drawn), "synthetic images"
    paths = files_to_predict(verify_on)
    chosen = np.sort(draw_indices(len(paths), num, SHEET)).tolist()
    word = "image" if len(paths) == 1 else "images"
    return np.stack([predictor.prepare(decode(paths[i])) for i in chosen]), f"{word} of {verify_on}"


def _drawn_image(seed: int, size: int = 96) -> np.ndarray:
    """Return a synthetic image (size, size, 3): smooth blobs in random colours, with noise."""
    rng = np.random.default_rng(seed)
    blobs = rng.integers(0, 256, (6, 6, 3), np.uint8)
    image = cv2.resize(blobs, (size, size), interpolation=cv2.INTER_CUBIC)
    return np.clip(rng.normal(image, rng.uniform(1, 7)), 0, 255).astype(np.uint8)


@dataclass(frozen=True)
class Agreement:
    """The result of a comparison of an exported file with its checkpoint.

    Attributes:
        num_images: Number of images.
        images: The images in a message, after their number.
        largest: Largest difference of a probability.
        num_other: Number of images with different predicted classes, without ties.
        milliseconds: Median time for one image, of the checkpoint and of the file.
    """

    num_images: int
    images: str
    largest: float
    num_other: int
    milliseconds: tuple[float, float]

    def check(self) -> None:
        """Check that an exported file predicts as its checkpoint.

        Raises:
            ValueError: The probabilities or the classes differ.
        """
        if self.largest > MAX_DIFFERENCE or self.num_other:
            differs = (
                f"a probability differs by {self.largest:.1e}, {self.num_other} have other classes"
            )
            raise ValueError(
                f"the export was discarded, since it does not predict as the checkpoint: on {self.num_images} "
                f"{self.images} {differs}"
            )

    def describe(self, compared: str, label_kind: str) -> str:
        """Return the result in a line.

        Args:
            compared: The beginning of the line.
            label_kind: `single` or `several`.
        """
        what = "labels" if label_kind == "several" else "classes"
        other = f"other {what} for {self.num_other}" if self.num_other else f"same {what}"
        checkpoint, file = self.milliseconds
        return (
            f"{compared} the checkpoint on {self.num_images} {self.images}: {other}, largest difference of a "
            f"probability {self.largest:.1e}; one image takes {checkpoint:.1f} ms with the checkpoint, {file:.1f} ms "
            "with the file"
        )

    def as_plain(self) -> dict[str, Any]:
        """Return it as plain values for JSON."""
        return {
            "num_images": self.num_images,
            "num_other": self.num_other,
            "largest_difference": self.largest,
            "milliseconds_of_the_network": round(self.milliseconds[0], 3),
            "milliseconds_of_the_file": round(self.milliseconds[1], 3),
        }


def load_exported(path: Path) -> PredictionFunction:
    """Load an exported file as another program would, and return the function that it computes."""
    if path.suffix == ".onnx":
        session = open_session(str(path))
        return lambda images: session.run(["probabilities"], {"images": images})[0]
    assert path.suffix == ".safetensors", f"no way to load a {path.suffix}"
    return Predictor(path).classify


def compare(
    predictor: Predictor, run: PredictionFunction, images: np.ndarray, what: str
) -> Agreement:
    """Compare a file with the checkpoint on prepared images (N, h, w, 3), in batches of 1, 2 and N.

    Args:
        predictor: The checkpoint.
        run: The function that the file computes.
        images: The images.
        what: The images in a message, after their number.
    """
    expected = predictor.classify(images)
    predictor.check(expected)
    largest = 0.0
    num_other = 0
    for num in (1, 2, len(images)):
        found = _differences(predictor, expected[:num], run(images[:num]))
        largest = max(largest, found[0])
        num_other = max(num_other, found[1])
    milliseconds = (_milliseconds(predictor.classify, images), _milliseconds(run, images))
    return Agreement(len(images), what, largest, num_other, milliseconds)


def _differences(
    predictor: Predictor, expected: np.ndarray, actual: np.ndarray
) -> tuple[float, int]:
    """Return the largest difference of a probability, and how many images have different classes, without ties."""
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return float("inf"), len(expected)
    differences = np.abs(actual - expected).max(axis=1)
    both = (torch.from_numpy(values.astype(np.float64)) for values in (expected, actual))
    expected_classes, classes = map(predictor.calibration.decide, both)
    is_other: np.ndarray = (classes != expected_classes).numpy()
    if is_other.ndim == 2:  # several labels
        is_other = np.asarray(is_other.any(axis=1))
    return float(differences.max()), int((is_other & (differences > _TIE)).sum())


def _milliseconds(run: PredictionFunction, images: np.ndarray) -> float:
    """Return the median milliseconds for one image of (N, h, w, 3)."""
    taken = []
    for i in range(_WARM_UP + _TIMED):
        began = time.perf_counter()
        run(images[i % len(images)][None])
        taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(taken[_WARM_UP:])
