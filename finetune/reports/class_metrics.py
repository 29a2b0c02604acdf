"""The tables of a test: the metrics of each class or label, and what is mistaken for what, or occurs together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from finetune.runs.intervals import wilson

# Shapes: K classes or labels.

# A larger matrix cannot be read; a list of its largest cells can.
MAX_MATRIX = 25  # classes or labels
NUM_PAIRS = 40  # cells of such a list, and sections of mistakes

Share = tuple[float, float, float]  # a share, and the ends of its 95 % interval


@dataclass(frozen=True)
class ClassMetrics:
    """A row of the table of classes or labels. What is undefined or unknown is None.

    All intervals are Wilson's. An average precision is treated as a share of the images with the label, as in
    `best_epoch.num_trials_of_labels`.

    Attributes:
        name: The class or label.
        num_right: Number of images with the label for which it is predicted.
        num_missed: Number of images with the label for which it is not predicted.
        num_false: Number of images for which it is wrongly predicted.
        average_precision: Mean precision over all thresholds; of several labels an image.
        threshold: The probability from which the label is predicted; of several labels an image.
        taken_for: The class as which its images are most often wrongly predicted, and their number.
        coverage: Share of the images with the label whose prediction set has it.
        set_size: Mean size of the prediction sets of these images.
    """

    name: str
    num_right: int
    num_missed: int
    num_false: int
    average_precision: Share | None = None
    threshold: float | None = None
    taken_for: tuple[str, int] | None = None
    coverage: Share | None = None
    set_size: float = 0.0

    @property
    def num_images(self) -> int:
        """Number of images with the label."""
        return self.num_right + self.num_missed

    @property
    def recall(self) -> Share | None:
        """Share of the images with the label for which it is predicted."""
        return _share(self.num_right, self.num_images)

    @property
    def precision(self) -> Share | None:
        """Share of the predictions that are right."""
        return _share(self.num_right, self.num_right + self.num_false)

    @property
    def f1(self) -> float | None:
        """The harmonic mean of precision and recall."""
        num = 2 * self.num_right + self.num_missed + self.num_false
        return 2 * self.num_right / num if num else None


def class_metrics(result: Mapping[str, Any]) -> list[ClassMetrics]:
    """Return a row for each class or label from the content of test.json; none without a test."""
    names = result.get("class_names", ())
    confusion = result.get("confusion_matrix")
    counts = _counts(np.array(confusion)) if confusion else result.get("label_counts") or ()
    sets = result.get("sets")
    rows = []
    for k, ((_, num_false), (num_missed, num_right)) in enumerate(counts):
        average = result.get(f"test/average_precision/{names[k]}")
        num = num_right + num_missed
        rows.append(
            ClassMetrics(
                name=names[k],
                num_right=num_right,
                num_missed=num_missed,
                num_false=num_false,
                average_precision=None if average is None else _share(average * num, num),
                threshold=None if confusion else thresholds_of(result)[k],
                taken_for=_taken_for(confusion[k], k, names) if confusion else None,
                # a damaged file may have more
                coverage=_share(min(sets["covered"][k], num), num) if sets else None,
                set_size=sets["size"][k] if sets else 0.0,
            )
        )
    return rows


def thresholds_of(result: Mapping[str, Any]) -> list[float]:
    """Return the threshold of each label in a test; with folds those of all folds together."""
    calibration = result.get("calibration") or result.get("joined_calibration") or {}
    return calibration.get("thresholds") or [0.5] * len(result.get("class_names", ()))


def _counts(confusion: np.ndarray) -> list[list[list[int]]]:
    """Return `label_counts` of test.json, (K, 2, 2), from a confusion matrix (K, K) with the true classes as rows."""
    right = confusion.diagonal()
    false = confusion.sum(axis=0) - right
    missed = confusion.sum(axis=1) - right
    others = confusion.sum() - right - false - missed
    counts: list[list[list[int]]] = (
        np.array([[others, false], [missed, right]]).transpose(2, 0, 1).tolist()
    )
    return counts


def _taken_for(row: Sequence[int], k: int, names: Sequence[str]) -> tuple[str, int] | None:
    """Return the class as which images of class `k` are most often wrongly predicted, from its row (K,)."""
    num, other = max((num if i != k else 0, -i) for i, num in enumerate(row))
    return (names[-other], num) if num else None


def _share(num_right: float, num: int) -> Share | None:
    return (num_right / num, *wilson(num_right, num)) if num else None


class Matrix(NamedTuple):
    """The confusion matrix of classes, or the labels that occur together.

    Attributes:
        heading: What it is.
        sentence: How to read it.
        between: The word between the names of row and column.
        names: Of its rows and columns, K.
        rows: The number of images of each cell and its share of those of the row, (K, K); none for many classes.
        largest: For many classes, row, column and number of the largest cells.
    """

    heading: str
    sentence: str
    between: str
    names: list[str]
    rows: list[list[tuple[int, float]]]
    largest: list[tuple[int, int, int]]


def matrix(result: Mapping[str, Any]) -> Matrix | None:
    """Return the matrix of a test from the content of test.json; None if there was none."""
    is_confusion = bool(result.get("confusion_matrix"))
    cells = result.get("confusion_matrix") or result.get("cooccurrence")
    if not cells:
        return None
    names = result["class_names"]
    is_large = len(names) > MAX_MATRIX
    counts = np.array(cells)
    if is_confusion:
        heading = "Most frequent confusions" if is_large else "Confusion matrix"
        sentence = "Rows are true classes, columns are predicted classes."
        totals = counts.sum(axis=1)
    else:
        heading = f"Labels that occur together{' most often' if is_large else ''}"
        sentence = "Number of test images with the label of the row and that of the column."
        sentence += " On the diagonal, all images with the label."
        totals = counts.diagonal()
    return Matrix(
        heading=heading,
        sentence=sentence,
        between="predicted as" if is_confusion else "and",
        names=names,
        rows=[] if is_large else _with_shares(counts, totals),
        largest=_largest(counts if is_confusion else np.triu(counts)) if is_large else [],
    )


def _with_shares(counts: np.ndarray, totals: np.ndarray) -> list[list[tuple[int, float]]]:
    """Return counts (K, K) with their shares of the totals of their rows, (K,)."""
    shares = counts / np.maximum(1, totals)[:, None]
    return [
        list(zip(*rows, strict=True)) for rows in zip(counts.tolist(), shares.tolist(), strict=True)
    ]


def _largest(counts: np.ndarray) -> list[tuple[int, int, int]]:
    """Return row, column and number of the largest counts (K, K) outside the diagonal."""
    first, second = np.nonzero(counts * ~np.eye(len(counts), dtype=bool))
    order = np.argsort(-counts[first, second], kind="stable")[:NUM_PAIRS]
    chosen = zip(first[order].tolist(), second[order].tolist(), strict=True)
    return [(i, j, int(counts[i, j])) for i, j in chosen]
