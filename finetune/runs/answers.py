"""Reads test_predictions.csv: the predicted class and the label of each test image."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Shapes: N images that could be decoded, K classes.


@dataclass(frozen=True)
class Answers:
    """The predictions for the test images.

    Attributes:
        class_names: Names of the K classes.
        paths: Path of each image, N.
        labels: True class of each image, (N,).
        predicted: Predicted class of each image, (N,).
        confidence: Probability of the predicted class, (N,).
        probabilities: Probability of each class, (N, K); None if the file has only the most probable classes.
        unread: Paths of images that could not be decoded.
    """

    class_names: list[str]
    paths: list[str]
    labels: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray
    probabilities: np.ndarray | None
    unread: list[str]

    @property
    def is_right(self) -> np.ndarray:
        """Whether each prediction is correct, (N,) bool."""
        return self.labels == self.predicted

    def of(self, label: int, predicted: int) -> np.ndarray:
        """Return the indices of images of class `label` that were predicted as `predicted`, most confident first."""
        indices = np.flatnonzero((self.labels == label) & (self.predicted == predicted))
        return indices[np.argsort(-self.confidence[indices], kind="stable")]


def read_answers(path: Path, class_names: Sequence[str]) -> Answers:
    """Read `test_predictions.csv`.

    Raises:
        ValueError: The file has other classes, or is damaged.
    """
    number = {name: i for i, name in enumerate(class_names)}
    columns = [f"p_{name}" for name in class_names]
    rows: list[dict[str, str]] = []
    unread: list[dict[str, str]] = []
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            for row in csv.DictReader(file):
                (unread if row["error"] else rows).append(row)
        is_whole = not rows or set(columns) <= rows[0].keys()
        numbers = ["probability", *(columns if is_whole else ())]
        if not all(math.isfinite(float(row[name])) for row in rows for name in numbers):
            raise ValueError("it has probabilities that are not finite numbers")
        return Answers(
            list(class_names),
            [row["path"] for row in rows],
            np.array([number[row["label"]] for row in rows], np.int64),
            np.array([number[row["class"]] for row in rows], np.int64),
            np.array([float(row["probability"]) for row in rows]),
            np.array([[float(row[c]) for c in columns] for row in rows]).reshape(-1, len(columns))
            if is_whole
            else None,
            [row["path"] for row in unread],
        )
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(
            f"{path} does not go with this run's classes, or is damaged: {error}"
        ) from error
