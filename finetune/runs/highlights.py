"""Chooses the test images of a report: some of each cell of the confusion matrix, and the most informative ones."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from finetune.runs.answers import Answers, LabelAnswers
from finetune.system.html_page import thumbnail

# Shapes: N test images, K classes, h and w pixels.

NUM_SHOWN = 12  # of each kind
# pixels: side of an image in a cell, and of a highlighted one
_SMALL = 144
_LARGE = 192
_MOST = 600  # images in all cells: about 8 kB each, 5 MB in all


@dataclass(frozen=True)
class ImageViewer:
    """Functions with which a report loads images and heat maps.

    Attributes:
        see: Returns the image of a path, prepared as for the network, (h, w, 3) uint8, with a width in pixels; None if
            it cannot be read.
        overlay: Returns a heat map (h, w, 3) uint8 for each image and its class, with a width in pixels; or a sentence
            with the reason why there are no heat maps.
    """

    see: Callable[[str, int], np.ndarray | None]
    overlay: Callable[[Sequence[str], Sequence[int], int], list[np.ndarray] | str]


@dataclass(frozen=True)
class ReportImage:
    """An image on the page: data URLs of it and of its heat map, and its caption.

    `no_overlay` is the reason why a requested heat map is missing. If images have several labels, `label` and
    `predicted` list all of them, and the confidence and the heat map are those of the label `subject`.
    """

    image: str
    overlay: str
    path: str
    label: str
    predicted: str
    confidence: float
    no_overlay: str = ""
    subject: str = ""


def kinds(answers: Answers) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield a heading, a sentence, and indices of images, the most informative first, of each kind of highlights."""
    right = answers.is_right
    confidence = answers.confidence
    wrong = np.flatnonzero(~right)
    yield (
        "Most confident mistakes",
        "Wrong with high confidence. Look here first for wrong labels and for kinds of images that training lacks.",
        wrong[np.argsort(-confidence[wrong], kind="stable")],
    )
    yield (
        "Least certain",
        "The predictions with the lowest confidence. More training images like these help most.",
        np.argsort(confidence, kind="stable"),
    )
    best = np.flatnonzero(right)
    yield (
        "Best examples",
        "Correct with the highest confidence, each class in turn.",
        _in_turn(best[np.argsort(-confidence[best], kind="stable")], answers.labels),
    )


def _in_turn(chosen: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the indices in a new order: the first image of each class, then the second of each, and so on."""
    place = np.zeros(len(chosen), np.int64)
    for label in np.unique(labels[chosen]):
        of_class = labels[chosen] == label
        place[of_class] = np.arange(of_class.sum())
    return chosen[np.argsort(place, kind="stable")]


def max_per_cell(counts: Sequence[int]) -> int:
    """Return the number of images that a cell may show, for a small page, given the number of images of each cell."""
    most = max(counts, default=0)
    while most > 1 and sum(min(count, most) for count in counts) > _MOST:
        most = most * 9 // 10
    return most


def report_images(
    answers: Answers, chosen: Sequence[int], viewer: ImageViewer, has_overlay: bool
) -> list[ReportImage]:
    """Return images for the page. The data URL of an image that cannot be read is empty.

    Args:
        answers: Predictions for all test images.
        chosen: Indices of the images.
        viewer: Loads the images.
        has_overlay: Whether to add a heat map of the predicted class to each.
    """
    paths = [answers.paths[i] for i in chosen]
    classes = [int(answers.predicted[i]) for i in chosen]
    views = _views(paths, classes, viewer, has_overlay)
    names = answers.class_names
    return [
        ReportImage(
            image=image,
            overlay=overlay,
            path=path,
            label=names[answers.labels[i]],
            predicted=names[answers.predicted[i]],
            confidence=float(answers.confidence[i]),
            no_overlay=views.no_overlay,
        )
        for i, path, image, overlay in zip(chosen, paths, views.images, views.overlays, strict=True)
    ]


def report_label_images(
    answers: LabelAnswers, chosen: Sequence[tuple[int, int]], viewer: ImageViewer, has_overlay: bool
) -> list[ReportImage]:
    """Return images with several labels for the page. The data URL of an image that cannot be read is empty.

    Args:
        answers: Predictions for all test images.
        chosen: Indices of the images, each with the index of a label.
        viewer: Loads the images.
        has_overlay: Whether to add a heat map of that label to each.
    """
    paths = [answers.paths[i] for i, _ in chosen]
    views = _views(paths, [k for _, k in chosen], viewer, has_overlay)
    return [
        ReportImage(
            image=image,
            overlay=overlay,
            path=path,
            label=", ".join(answers.named(answers.labels[i])),
            predicted=", ".join(answers.named(answers.predicted[i])),
            confidence=float(answers.probabilities[i, k]),
            no_overlay=views.no_overlay,
            subject=answers.class_names[k],
        )
        for (i, k), path, image, overlay in zip(
            chosen, paths, views.images, views.overlays, strict=True
        )
    ]


@dataclass(frozen=True)
class _Views:
    """Data URLs of images and heat maps; "" for those that are missing."""

    images: list[str]
    overlays: list[str]
    no_overlay: str


def _views(
    paths: Sequence[str], classes: Sequence[int], viewer: ImageViewer, has_overlay: bool
) -> _Views:
    """Load images, and a heat map of one class for each if `has_overlay`."""
    side = _LARGE if has_overlay else _SMALL
    with ThreadPoolExecutor() as threads:
        loaded = list(threads.map(lambda path: viewer.see(path, side), paths))
        images = list(
            threads.map(lambda image: "" if image is None else thumbnail(image, side), loaded)
        )
    readable = [k for k, image in enumerate(loaded) if image is not None]
    overlays = [""] * len(paths)
    no_overlay = ""
    if has_overlay and readable:
        heat_maps = viewer.overlay(
            [paths[k] for k in readable], [classes[k] for k in readable], side
        )
        if isinstance(heat_maps, str):
            no_overlay = heat_maps
        else:
            for k, overlay in zip(readable, heat_maps, strict=True):
                overlays[k] = thumbnail(overlay, side)
    return _Views(images, overlays, no_overlay)
