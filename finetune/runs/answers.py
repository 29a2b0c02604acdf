"""Reads test_predictions.csv: the predicted and the true class of each test image, or its labels if it has several."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finetune.runs.prediction_rows import label_separator

# Shapes: N images that could be decoded, K classes.

_LARGEST = 1 + 1e-6  # probability, with rounding
_NO_PROBABILITY = "it has probabilities that are not numbers from 0 to 1"


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
        if not all(0 <= float(row[name]) <= _LARGEST for row in rows for name in numbers):
            raise ValueError(_NO_PROBABILITY)
        return Answers(
            class_names=list(class_names),
            paths=[row["path"] for row in rows],
            labels=np.array([number[row["label"]] for row in rows], np.int64),
            predicted=np.array([number[row["class"]] for row in rows], np.int64),
            confidence=np.array([float(row["probability"]) for row in rows]),
            probabilities=np.array([[float(row[c]) for c in columns] for row in rows]).reshape(
                -1, len(columns)
            )
            if is_whole
            else None,
            unread=[row["path"] for row in unread],
        )
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(
            f"{path} does not go with this run's classes, or is damaged: {error}"
        ) from error


@dataclass(frozen=True)
class LabelAnswers:
    """The predictions for test images that have several labels.

    Attributes:
        class_names: Names of the K labels.
        paths: Path of each image, N.
        labels: Whether each image has each label, (N, K) bool.
        predicted: Whether each label is predicted, (N, K) bool.
        probabilities: Probability of each label, (N, K).
        unread: Paths of images that could not be decoded.
    """

    class_names: list[str]
    paths: list[str]
    labels: np.ndarray
    predicted: np.ndarray
    probabilities: np.ndarray
    unread: list[str]

    @property
    def is_right(self) -> np.ndarray:
        """Whether all labels of each image are predicted, and no other ones, (N,) bool."""
        return (self.labels == self.predicted).all(axis=1)

    def missed(self, label: int) -> np.ndarray:
        """Return the indices of images with a label that is not predicted, the least probable first."""
        indices = np.flatnonzero(self.labels[:, label] & ~self.predicted[:, label])
        return indices[np.argsort(self.probabilities[indices, label], kind="stable")]

    def false(self, label: int) -> np.ndarray:
        """Return the indices of images for which a label is wrongly predicted, the most probable first."""
        indices = np.flatnonzero(self.predicted[:, label] & ~self.labels[:, label])
        return indices[np.argsort(-self.probabilities[indices, label], kind="stable")]

    def named(self, chosen: np.ndarray) -> list[str]:
        """Return the names of labels, from whether each is chosen (K,)."""
        return [self.class_names[k] for k in np.flatnonzero(chosen)]


def read_label_answers(path: Path, class_names: Sequence[str]) -> LabelAnswers:
    """Read the `test_predictions.csv` of a network for several labels an image.

    Raises:
        ValueError: The file has other labels, or is damaged.
    """
    separator = label_separator(class_names)
    number = {name: k for k, name in enumerate(class_names)}
    rows: list[dict[str, str]] = []
    unread: list[dict[str, str]] = []

    def multi_hot(column: str) -> np.ndarray:
        chosen = np.zeros((len(rows), len(class_names)), bool)
        for i, row in enumerate(rows):
            chosen[i, [number[name] for name in row[column].split(separator) if name]] = True
        return chosen

    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            for row in csv.DictReader(file):
                (unread if row["error"] else rows).append(row)
        columns = [f"p_{name}" for name in class_names]
        probabilities = np.array([[float(row[c]) for c in columns] for row in rows])
        if not ((probabilities >= 0) & (probabilities <= _LARGEST)).all():
            raise ValueError(_NO_PROBABILITY)
        return LabelAnswers(
            class_names=list(class_names),
            paths=[row["path"] for row in rows],
            labels=multi_hot("labels"),
            predicted=multi_hot("predicted"),
            probabilities=probabilities.reshape(-1, len(columns)),
            unread=[row["path"] for row in unread],
        )
    except (KeyError, TypeError, ValueError, AttributeError, csv.Error) as error:
        raise ValueError(
            f"{path} does not go with this run's labels, or is damaged: {error}"
        ) from error
