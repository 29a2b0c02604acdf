"""Holds an exported file against the network that it was made of, on pictures."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import torch

from finetune.inference.onnx_network import open_session
from finetune.inference.predictor import Predictor

LARGEST = 1e-4  # difference of a probability; float32's rounding gives 1e-8 to 5e-6
_TIE = 1e-6  # of probabilities: which class is said then is a matter of float32's rounding
# Threads of torch and of onnxruntime wait busily for a while: a first call after the other library's took 2.5 times as
# long (ResNet-18 at 128 pixels, two cores), so that each has several calls, of which the last counts.
_ROUNDS, _CALLS = 7, 5

_MOST_TIMED = 4  # pictures as they are, which may be large
# pictures (N, h, w, 3) uint8, prepared or not, to probabilities (N, K)
Run = Callable[[np.ndarray], np.ndarray]


def drawn_image(seed: int, size: int = 96) -> np.ndarray:
    """Return an image (size, size, 3) of ellipses on a smooth background, in random colours and with some noise."""
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
    """What came of it.

    Attributes:
        num_pictures: On how many.
        largest: Difference of a probability.
        num_other: Of pictures of which another class is said, ties apart.
        milliseconds: The network's for one picture at a time, and the file's: medians, taken in turns.
    """

    num_pictures: int
    largest: float
    num_other: int
    milliseconds: tuple[float, float]

    @property
    def is_good(self) -> bool:
        return self.largest <= LARGEST and self.num_other == 0


def opened(path: Path) -> Run:
    """Return what an exported file computes, as a program of another kind than ours would have it."""
    if path.suffix == ".onnx":
        session = open_session(str(path))
        return lambda images: session.run(["probabilities"], {"images": images})[0]
    if path.suffix == ".pt2":
        program = torch.export.load(path).module()  # written by ourselves, a moment ago
        return lambda images: program(torch.from_numpy(images))[0].detach().numpy()
    return Predictor(path).classify


def hold_against(predictor: Predictor, run: Run, images: np.ndarray) -> Agreement:
    """Compare what a file says of prepared pictures (N, h, w, 3), one, two and all at a time, with the network."""
    own = predictor.classify(images)
    found = [_differences(predictor, own[:num], run(images[:num])) for num in (1, 2, len(images))]
    largest, num_other = (max(values) for values in zip(*found, strict=True))
    return Agreement(len(images), largest, num_other, timed(predictor.classify, run, images))


def hold_any_size_against(
    predictor: Predictor, own: Run, run: Run, pictures: Iterable[np.ndarray]
) -> Agreement:
    """Compare what two say of pictures (H, W, 3) of any sizes, and of tiny, wide, tall, large pieces of the first ones.

    Args:
        predictor: Which decides about classes.
        own: What the file should say.
        run: What it says.
        pictures: Any number of them, one held at a time.
    """
    rest = iter(pictures)
    first = list(islice(rest, _MOST_TIMED))
    cut = (piece for picture in first for piece in _pieces(picture))
    alone = (picture[None] for picture in chain(first, cut, rest))
    num = 0
    largest = 0.0
    num_other = 0
    for batch in chain(alone, (np.stack([picture, picture[::-1]]) for picture in first)):
        differs, others = _differences(predictor, own(batch), run(batch))
        num = num + len(batch)
        largest = max(largest, differs)
        num_other = num_other + others
    return Agreement(num, largest, num_other, timed(own, run, first))


def _pieces(picture: np.ndarray) -> Iterator[np.ndarray]:
    """Yield parts of a picture (H, W, 3), and four of it side by side."""
    height, width = picture.shape[:2]
    for rows, columns in (
        (1, 1),
        (3, width),
        (height, 2),
        (-(-height // 3), -(-width // 2)),
        (height, -(-width // 7)),
    ):
        yield np.ascontiguousarray(picture[-rows:, -columns:])
    yield np.tile(picture, (2, 2, 1))


def _differences(predictor: Predictor, own: np.ndarray, found: np.ndarray) -> tuple[float, int]:
    """Return by how much a probability differs, and of how many pictures the class does."""
    if found.shape != own.shape or not np.isfinite(found).all():
        return float("inf"), len(own)
    differs = np.abs(found - own).max(axis=1)
    is_other = predictor.decide(found.astype(np.float64)) != predictor.decide(
        own.astype(np.float64)
    )
    return float(differs.max()), int((is_other & (differs > _TIE)).sum())


def timed(
    first: Run, second: Run, images: Sequence[np.ndarray] | np.ndarray
) -> tuple[float, float]:
    """Return the milliseconds that each takes for one of the pictures (h, w, 3): medians, taken in turns."""
    seconds: tuple[list[float], list[float]] = [], []
    for i in range(_ROUNDS):
        image = images[i % len(images)][None]
        for run, taken in zip((first, second), seconds, strict=True):
            for _ in range(_CALLS - 1):
                run(image)
            began = time.perf_counter()
            run(image)
            taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(seconds[0]), statistics.median(seconds[1])
