"""The test images of a page: those behind each number of a table, and the most informative ones of all."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from finetune.inference.image_viewer import ImageViewer
from finetune.reports.class_metrics import MAX_MATRIX, NUM_PAIRS
from finetune.runs.predictions_table import Predictions
from finetune.system.html_page import thumbnail

# Shapes: N test images, K classes or labels.

NUM_SHOWN = 12  # of each kind
# pixels: side of an image in a section, and of a highlighted one
_SMALL = 144
_LARGE = 192
_MOST = 600  # images in all sections: about 8 kB each, 5 MB in all
_TINY = 1e-12

Chosen = Sequence[tuple[int, int]]  # an image, and the class or label that it is shown for


@dataclass(frozen=True)
class ReportImage:
    """An image on the page: data URLs of it and of its heat map, and its caption.

    Attributes:
        image: Data URL; "" if the image cannot be read.
        overlay: Data URL of the heat map of `subject`; "" if there is none.
        path: Its file.
        label: Its class, or all of its labels.
        predicted: The predicted class, or all predicted labels.
        subject: The class or label that it is shown for.
        confidence: The probability of `subject`.
        no_overlay: The reason why a requested heat map is missing.
    """

    image: str
    overlay: str
    path: str
    label: str
    predicted: str
    subject: str
    confidence: float
    no_overlay: str


def report_images(
    predictions: Predictions, chosen: Chosen, viewer: ImageViewer, has_overlay: bool = False
) -> list[ReportImage]:
    """Return images for the page.

    Args:
        predictions: Those for all test images.
        chosen: The images, each with the class or label that it is shown for.
        viewer: Loads the images.
        has_overlay: Whether to add a heat map of that class or label to each.
    """
    side = _LARGE if has_overlay else _SMALL
    paths = [predictions.paths[i] for i, _ in chosen]
    with ThreadPoolExecutor() as threads:
        loaded = list(threads.map(lambda path: viewer.see(path, side), paths))
        images = list(threads.map(lambda x: "" if x is None else thumbnail(x, side), loaded))
    readable = [row for row, image in enumerate(loaded) if image is not None]
    overlays = [""] * len(paths)
    no_overlay = ""
    if has_overlay and readable:
        subjects = [chosen[row][1] for row in readable]
        heat_maps = viewer.overlay([paths[row] for row in readable], subjects, side)
        if isinstance(heat_maps, str):
            no_overlay = heat_maps
        else:
            for row, overlay in zip(readable, heat_maps, strict=True):
                overlays[row] = thumbnail(overlay, side)
    return [
        ReportImage(
            image=images[row],
            overlay=overlays[row],
            path=paths[row],
            label=", ".join(predictions.named(predictions.labels[i])),
            predicted=", ".join(predictions.named(predictions.decided[i])),
            subject=predictions.names[k],
            confidence=float(predictions.probabilities[i, k]),
            no_overlay=no_overlay,
        )
        for row, (i, k) in enumerate(chosen)
    ]


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


def image_sections(predictions: Predictions, viewer: ImageViewer | None) -> list[ImageSection]:
    """Return the images of each cell of the confusion matrix, or the mistakes of each label.

    Of many classes or labels, only the most frequent mistakes have a section. Without a viewer they have no images.
    """
    numbers = list(_cells(predictions) if predictions.is_single else _mistakes(predictions))
    if len(predictions.names) > MAX_MATRIX:
        numbers = sorted(
            (one for one in numbers if not one.is_right), key=lambda one: -len(one.images)
        )[:NUM_PAIRS]
    most = max_per_section([len(one.images) for one in numbers])
    sections = []
    for one in numbers:
        chosen = [(i, one.subject) for i in one.images[:most].tolist()]
        shown = report_images(predictions, chosen, viewer) if viewer else []
        sections.append(ImageSection(one.id, one.heading, one.order, len(one.images), shown))
    return sections


class _Number(NamedTuple):
    """A number of a table: the images, in order, that it counts, and the class or label that they are shown for."""

    id: str
    heading: str
    order: str
    subject: int
    images: np.ndarray
    is_right: bool = False


def _cells(predictions: Predictions) -> Iterator[_Number]:
    """Yield the cells of the confusion matrix that have images."""
    names = predictions.names
    confused = np.stack([predictions.labels.argmax(axis=1), predictions.decided.argmax(axis=1)])
    for i, j in np.unique(confused, axis=1).T.tolist():
        what = "predicted correctly" if i == j else f"predicted as {names[j]}"
        images = predictions.taken_for(i, j)
        heading = f"{names[i]}, {what}"
        yield _Number(f"cell-{i}-{j}", heading, "The most confident first", j, images, i == j)


def _mistakes(predictions: Predictions) -> Iterator[_Number]:
    """Yield the mistakes of each label."""
    for k, name in enumerate(predictions.names):
        missed = predictions.missed(k)
        if len(missed):
            yield _Number(f"missed-{k}", f"{name}, missed", "The least probable first", k, missed)
        false = predictions.false(k)
        if len(false):
            heading = f"{name}, falsely predicted"
            yield _Number(f"false-{k}", heading, "The most probable first", k, false)


def max_per_section(counts: Sequence[int]) -> int:
    """Return how many images a section may show, for a small page, from the number of images of each section."""
    most = max(counts, default=0)
    while most > 1 and sum(min(count, most) for count in counts) > _MOST:
        most = most * 9 // 10
    return most


class Highlights(NamedTuple):
    """Images of one kind that tell much about the network.

    Attributes:
        heading: The kind.
        sentence: What they are good for.
        chosen: The first `NUM_SHOWN` of them, the most informative first.
        num_mistakes: Number of all of them, if they are mistakes.
    """

    heading: str
    sentence: str
    chosen: Chosen
    num_mistakes: int | None = None


def highlights(predictions: Predictions, thresholds: Sequence[float]) -> Iterator[Highlights]:
    """Yield the kinds of images to look at.

    Args:
        predictions: Those for all test images.
        thresholds: The probability from which each label is predicted, K; of one class an image, they are not used.
    """
    p = predictions.probabilities
    labels = predictions.labels
    decided = predictions.decided
    false = decided & ~labels
    missed = labels & ~decided
    if predictions.is_single:
        yield Highlights(
            "Most confident mistakes",
            "Wrong with high confidence. Look here first for wrong labels and for kinds of images that training lacks.",
            _first_pairs(-p[false], false),
            int(false.sum()),
        )
        yield Highlights(
            "Least certain",
            "The predictions with the lowest confidence. More training images like these help most.",
            _first_pairs(p[decided], decided),
        )
        return
    yield Highlights(
        "Most confident false predictions",
        "Predicted with a high probability, but the image does not have the label. Look here first for labels that "
        "were forgotten.",
        _first_pairs(-p[false], false),
        int(false.sum()),
    )
    yield Highlights(
        "Most confident misses",
        "The image has the label, but its probability is low. Look here for wrong labels and for kinds of images "
        "that training lacks.",
        _first_pairs(p[missed], missed),
        int(missed.sum()),
    )
    yield Highlights(
        "Closest to the threshold",
        "The label is predicted or not by a small margin. More training images like these help most.",
        _first_pairs(
            np.abs(log_odds(p) - log_odds(np.array(thresholds))).ravel(), np.ones_like(false)
        ),
    )


def _first_pairs(values: np.ndarray, is_chosen: np.ndarray) -> list[tuple[int, int]]:
    """Return the pairs (image, label) with the lowest values, each image once.

    Args:
        values: Of the chosen pairs, row by row.
        is_chosen: Which pairs to consider, (N, K).
    """
    images, labels = np.nonzero(is_chosen)
    pairs: dict[int, int] = {}
    for i in np.argsort(values, kind="stable"):
        pairs.setdefault(int(images[i]), int(labels[i]))
        if len(pairs) == NUM_SHOWN:
            break
    return list(pairs.items())


def log_odds(p: np.ndarray) -> np.ndarray:
    """Return the log odds of probabilities. 0 and 1 give large finite ones."""
    p = p.clip(_TINY, 1 - _TINY)
    return np.log(p / (1 - p))
