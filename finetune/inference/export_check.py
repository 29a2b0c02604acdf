"""Holds an exported file against the network that it was made of, on real pictures."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from finetune.inference.onnx_network import open_session
from finetune.inference.predictor import Predictor

LARGEST = 1e-4  # difference of a probability; float32's rounding gives 1e-8 to 5e-6
_ROUNDS = 15

Run = Callable[[np.ndarray], np.ndarray]  # prepared pictures (N, h, w, 3) uint8 to probabilities (N, K)


class Agreement(NamedTuple):
    """What came of it.

    Attributes:
        num_pictures: On how many.
        largest: Difference of a probability.
        num_other: Of pictures of which another class is said.
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
    largest, num_other = 0.0, 0
    for num in (1, 2, len(images)):
        found = run(images[:num])
        difference = np.abs(found - own[:num]).max() if found.shape == own[:num].shape else np.inf
        largest = max(largest, float(np.nan_to_num(difference, nan=np.inf)))
        if found.shape == own[:num].shape:
            differ = predictor.decide(found.astype(np.float64)) != predictor.decide(own[:num])
            num_other = max(num_other, int(differ.sum()))
    return Agreement(len(images), largest, num_other, timed(predictor.classify, run, images))


def timed(first: Run, second: Run, images: np.ndarray) -> tuple[float, float]:
    """Return the milliseconds that each takes for one of the pictures (N, h, w, 3): medians, taken in turns."""
    seconds: tuple[list[float], list[float]] = [], []
    for i in range(_ROUNDS):
        for run, taken in zip((first, second), seconds, strict=True):
            began = time.perf_counter()
            run(images[i % len(images)][None])
            taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(seconds[0]), statistics.median(seconds[1])
