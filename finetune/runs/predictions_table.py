"""The predictions for the test images of a run, of one class or several labels: reads test_predictions.csv."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Shapes: N images that could be decoded, K classes or labels.

NUM_BEST = 5  # classes in a row of many classes
MANY_CLASSES = 50  # with more classes, the rows have only the most probable ones
_SEPARATORS = (";", "|", "\t")
_LARGEST = 1 + 1e-6  # probability, with rounding


def label_separator(class_names: Sequence[str]) -> str:
    """Return the character between the labels of an image in a CSV file: `;`, or another one if a name has it."""
    unused = (mark for mark in _SEPARATORS if not any(mark in name for name in class_names))
    return next(unused, _SEPARATORS[0])


@dataclass(frozen=True)
class Predictions:
    """What is true of each test image, and what was predicted. A class is a label that excludes the others.

    Attributes:
        names: The K classes or labels.
        paths: Path of each image, N.
        is_single: Whether an image has one class, not several labels or none.
        labels: Whether each image has each label, (N, K) bool.
        decided: Whether each label is predicted, (N, K) bool.
        probabilities: Probability of each label, (N, K). Of many classes, only those of the five best are above 0.
        unread: Paths of images that could not be decoded.
        groups: The group of each image, N; None if there are no groups.
    """

    names: list[str]
    paths: list[str]
    is_single: bool
    labels: np.ndarray
    decided: np.ndarray
    probabilities: np.ndarray
    unread: list[str]
    groups: list[str] | None = None

    @classmethod
    def read(
        cls, path: Path, names: Sequence[str], is_single: bool, key: str = "path"
    ) -> "Predictions":
        """Read `test_predictions.csv`, or with the key `group` the file of groups, whose paths are their names.

        Raises:
            ValueError: The file has other classes, or is damaged.
        """
        try:
            with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
                all_rows = list(csv.DictReader(file))
            rows = [row for row in all_rows if not row["error"]]
            place = {name: k for k, name in enumerate(names)}
            columns = ("label", "class") if is_single else ("labels", "predicted")
            separator = None if is_single else label_separator(names)
            labels, decided = (_multi_hot(rows, name, place, separator) for name in columns)
            return cls(
                names=list(names),
                paths=[row[key] for row in rows],
                is_single=is_single,
                labels=labels,
                decided=decided,
                probabilities=_probabilities(rows, place, is_single),
                unread=[row[key] for row in all_rows if row["error"]],
                groups=[row["group"] for row in rows] if "group" in (rows or [{}])[0] else None,
            )
        except (KeyError, TypeError, ValueError, AttributeError, csv.Error) as error:
            kind = "classes" if is_single else "labels"
            raise ValueError(
                f"{path} does not go with this run's {kind}, or is damaged: {error}"
            ) from error

    @property
    def is_right(self) -> np.ndarray:
        """Whether all labels of each image are predicted, and no other ones, (N,) bool."""
        return (self.labels == self.decided).all(axis=1)

    @property
    def confidence(self) -> np.ndarray:
        """Probability of the predicted class (N,); of several labels, that of the least certain decision."""
        p = self.probabilities
        if self.is_single:
            return p[self.decided]
        return np.where(self.decided, p, 1 - p).min(axis=1)

    def missed(self, k: int) -> np.ndarray:
        """Return the indices of images with a label that is not predicted, the least probable first."""
        return self._by_probability(self.labels[:, k] & ~self.decided[:, k], k, 1)

    def false(self, k: int) -> np.ndarray:
        """Return the indices of images for which a label is wrongly predicted, the most probable first."""
        return self._by_probability(self.decided[:, k] & ~self.labels[:, k], k, -1)

    def taken_for(self, k: int, other: int) -> np.ndarray:
        """Return the indices of images of class `k` that are predicted as `other`, the most probable first."""
        return self._by_probability(self.labels[:, k] & self.decided[:, other], other, -1)

    def _by_probability(self, is_chosen: np.ndarray, k: int, sign: int) -> np.ndarray:
        indices = np.flatnonzero(is_chosen)
        return indices[np.argsort(sign * self.probabilities[indices, k], kind="stable")]

    def named(self, chosen: np.ndarray) -> list[str]:
        """Return the names of labels, from whether each is chosen (K,)."""
        return [self.names[k] for k in np.flatnonzero(chosen)]


def _has_best_only(num_classes: int, is_single: bool) -> bool:
    return is_single and num_classes > MANY_CLASSES


def _multi_hot(
    rows: Sequence[dict[str, str]], column: str, place: dict[str, int], separator: str | None
) -> np.ndarray:
    """Return whether each row names each label, (N, K) bool; with a separator, a row has several or none."""
    chosen = np.zeros((len(rows), len(place)), bool)
    for i, row in enumerate(rows):
        names = [row[column]] if separator is None else row[column].split(separator)
        chosen[i, [place[name] for name in names if name or separator is None]] = True
    return chosen


def _probabilities(
    rows: Sequence[dict[str, str]], place: dict[str, int], is_single: bool
) -> np.ndarray:
    """Return the probabilities, (N, K)."""
    if _has_best_only(len(place), is_single):
        p = np.zeros((len(rows), len(place)))
        for end in ("", *(f"_{i}" for i in range(2, NUM_BEST + 1))):
            of_images = [place[row[f"class{end}"]] for row in rows]
            p[np.arange(len(rows)), of_images] = [float(row[f"probability{end}"]) for row in rows]
    else:
        columns = [f"p_{name}" for name in place]
        values = [[float(row[name]) for name in columns] for row in rows]
        p = np.array(values).reshape(-1, len(place))
    if not ((p >= 0) & (p <= _LARGEST)).all():
        raise ValueError("it has probabilities that are not numbers from 0 to 1")
    return p
