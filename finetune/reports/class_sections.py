"""The part of report.html about classes or labels: what is mistaken for what, or occurs together, and its images."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from finetune.inference.image_viewer import ImageViewer
from finetune.reports.test_images import ReportImage, max_per_section, report_images
from finetune.runs.predictions_table import Predictions

# A larger matrix cannot be read; a list of its largest cells can.
_MAX_MATRIX = 25  # classes or labels
_NUM_PAIRS = 40  # cells of such a list, and sections of mistakes

# Shapes: N images, K classes or labels.


@dataclass(frozen=True)
class ImageSection:
    """The images that one number of a table counts.

    Attributes:
        id: Id of the section in HTML.
        heading: What they have in common.
        order: Which images come first.
        count: Number of images.
        images: The first of them.
    """

    id: str
    heading: str
    order: str
    count: int
    images: list[ReportImage]


@dataclass(frozen=True)
class Matrix:
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
    names = result.get("class_names", [])
    is_large = len(names) > _MAX_MATRIX
    if result.get("confusion_matrix"):
        counts = np.array(result["confusion_matrix"])
        return Matrix(
            heading="Most frequent confusions" if is_large else "Confusion matrix",
            sentence="Rows are true classes, columns are predicted classes.",
            between="predicted as",
            names=names,
            rows=[] if is_large else _with_shares(counts, counts.sum(axis=1)),
            largest=_largest(counts) if is_large else [],
        )
    if result.get("cooccurrence"):
        counts = np.array(result["cooccurrence"])
        return Matrix(
            heading=f"Labels that occur together{' most often' if is_large else ''}",
            sentence="Number of test images with the label of the row and that of the column. On the diagonal, all "
            "images with the label.",
            between="and",
            names=names,
            rows=[] if is_large else _with_shares(counts, counts.diagonal()),
            largest=_largest(np.triu(counts)) if is_large else [],
        )
    return None


def _with_shares(counts: np.ndarray, totals: np.ndarray) -> list[list[tuple[int, float]]]:
    """Return counts (K, K) with their shares of the totals of their rows, (K,)."""
    return [
        [(num, num / max(1, total)) for num in row]
        for row, total in zip(counts.tolist(), totals.tolist(), strict=True)
    ]


def _largest(counts: np.ndarray) -> list[tuple[int, int, int]]:
    """Return row, column and number of the largest counts (K, K) outside the diagonal."""
    first, second = np.nonzero(counts * ~np.eye(len(counts), dtype=bool))
    order = np.argsort(-counts[first, second], kind="stable")[:_NUM_PAIRS]
    return [
        (int(i), int(j), int(counts[i, j]))
        for i, j in zip(first[order], second[order], strict=True)
    ]


def image_sections(predictions: Predictions, viewer: ImageViewer | None) -> list[ImageSection]:
    """Return the images of each cell of the confusion matrix, or the mistakes of each label.

    Of many classes or labels, only the most frequent mistakes have a section. Without a viewer they have no images.
    """
    found = list(_cells(predictions) if predictions.is_single else _mistakes(predictions))
    most = max_per_section([len(one.images) for one in found])
    sections = []
    for one in found:
        chosen = [(i, one.subject) for i in one.images[:most].tolist()]
        shown = report_images(predictions, chosen, viewer) if viewer else []
        sections.append(ImageSection(one.id, one.heading, one.order, len(one.images), shown))
    return sections


class _Found(NamedTuple):
    """The images of a section, as in `ImageSection`, with the class or label that they are shown for."""

    id: str
    heading: str
    order: str
    subject: int
    images: np.ndarray


def _cells(predictions: Predictions) -> Iterator[_Found]:
    """Yield the cells of the confusion matrix that have images, the largest first; of many classes only mistakes."""
    names = predictions.names
    confused = np.stack([predictions.labels.argmax(axis=1), predictions.decided.argmax(axis=1)])
    pairs, counts = np.unique(confused, axis=1, return_counts=True)
    largest_first = pairs[:, np.argsort(-counts, kind="stable")].T.tolist()
    if len(names) > _MAX_MATRIX:
        largest_first = [(i, j) for i, j in largest_first if i != j][:_NUM_PAIRS]
    for i, j in largest_first:
        what = "predicted correctly" if i == j else f"predicted as {names[j]}"
        yield _Found(
            id=f"cell-{i}-{j}",
            heading=f"{names[i]}, {what}",
            order="The most confident first",
            subject=j,
            images=predictions.taken_for(i, j),
        )


def _mistakes(predictions: Predictions) -> list[_Found]:
    """Return the mistakes of each label; of many labels, the most frequent ones."""
    found = []
    for k, name in enumerate(predictions.names):
        missed = predictions.missed(k)
        false = predictions.false(k)
        found.append(
            _Found(f"missed-{k}", f"{name}, missed", "The least probable first", k, missed)
        )
        heading = f"{name}, falsely predicted"
        found.append(_Found(f"false-{k}", heading, "The most probable first", k, false))
    if len(predictions.names) > _MAX_MATRIX:
        found = sorted(found, key=lambda one: -len(one.images))[:_NUM_PAIRS]
    return [one for one in found if len(one.images)]
