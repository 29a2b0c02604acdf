"""test_predictions.csv read back: what a network said of each test picture, beside what it is."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Shapes: N pictures that could be read, K classes.


@dataclass(frozen=True)
class Answers:
    """What was said of the test pictures.

    Attributes:
        class_names: The K classes.
        paths: Of each picture, N.
        labels: The class that it is of, (N,).
        predicted: The class that was said, (N,).
        confidence: Its probability, (N,).
        probabilities: Of each class, (N, K); None where the file holds the best ones only.
        unread: Paths of pictures that could not be decoded.
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
        """Whether each was said right, (N,) bool."""
        return self.labels == self.predicted

    def of(self, label: int, predicted: int) -> np.ndarray:
        """Return the pictures of one class that were taken for another, the most confident first."""
        found = np.flatnonzero((self.labels == label) & (self.predicted == predicted))
        return found[np.argsort(-self.confidence[found], kind="stable")]


def read_answers(path: Path, class_names: Sequence[str]) -> Answers:
    """Read `test_predictions.csv`.

    Raises:
        ValueError: It is not of these classes, or damaged.
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
