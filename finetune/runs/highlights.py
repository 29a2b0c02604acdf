"""Which test images a report shows: those of each cell of the confusion matrix, and those that are worth a look."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from finetune.runs.answers import Answers, LabelAnswers
from finetune.system.html_page import thumbnail

# Shapes: N test pictures, K classes, h and w pixels.

NUM_SHOWN = 12  # of each kind
_SMALL, _LARGE = 144, 192  # pixels: of an image in a cell, and of one that is worth a look
_MOST = 600  # images in all cells together: up to 5 MB of a page at about 8 kB each


@dataclass(frozen=True)
class Lens:
    """What lets a report look at pictures.

    Attributes:
        see: Gives the picture of a path as (h, w, 3) uint8, as the network sees it but so many pixels wide; None where
            there is none any more.
        overlay: Returns for images and one class each a heat map of the class, (h, w, 3) uint8 with the given width;
            or a sentence that says why there is none.
    """

    see: Callable[[str, int], np.ndarray | None]
    overlay: Callable[[Sequence[str], Sequence[int], int], list[np.ndarray] | str]


@dataclass(frozen=True)
class Shown:
    """An image on the page: data URLs of it and of its heat map, and its caption.

    `no_overlay` says why there is no heat map, if one was wanted. If images have several labels, `label` and
    `predicted` name all of them, and `subject` is the label that the confidence and the heat map are of.
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
    """Yield what is worth looking at: a heading, a sentence, and the pictures, the most telling first."""
    right, confidence = answers.is_right, answers.confidence
    wrong = np.flatnonzero(~right)
    yield (
        "Most confident mistakes",
        "Wrong with high confidence. Look here first for wrong labels and for kinds of images that training lacks.",
        wrong[np.argsort(-confidence[wrong], kind="stable")],
    )
    yield (
        "Least certain",
        "Right or wrong nearly by chance. More training images like these help most.",
        np.argsort(confidence, kind="stable"),
    )
    best = np.flatnonzero(right)
    yield (
        "Best examples",
        "Correct with the highest confidence, each class in turn.",
        _in_turn(best[np.argsort(-confidence[best], kind="stable")], answers.labels),
    )


def _in_turn(chosen: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the same pictures, one of each class, then the second of each, and so on."""
    place = np.zeros(len(chosen), np.int64)
    for label in np.unique(labels[chosen]):
        of_class = labels[chosen] == label
        place[of_class] = np.arange(of_class.sum())
    return chosen[np.argsort(place, kind="stable")]


def most_of_cells(counts: Sequence[int]) -> int:
    """Return how many pictures of each cell can be shown, given how many each has: all, or fewer for a small page."""
    most = max(counts, default=0)
    while most > 1 and sum(min(count, most) for count in counts) > _MOST:
        most = most * 9 // 10
    return most


def shown(answers: Answers, chosen: Sequence[int], lens: Lens, has_overlay: bool) -> list[Shown]:
    """Return pictures as the page shows them; those that are gone have an empty address.

    Args:
        answers: Of all test pictures.
        chosen: Which of them.
        lens: How to look at them.
        has_overlay: Whether to add a heat map of the predicted class to each.
    """
    paths = [answers.paths[i] for i in chosen]
    classes = [int(answers.predicted[i]) for i in chosen]
    views = _views(paths, classes, lens, has_overlay)
    names = answers.class_names
    return [
        Shown(
            image,
            overlay,
            path,
            names[answers.labels[i]],
            names[answers.predicted[i]],
            float(answers.confidence[i]),
            views.no_overlay,
        )
        for i, path, image, overlay in zip(chosen, paths, views.images, views.overlays, strict=True)
    ]


def shown_labels(
    answers: LabelAnswers, chosen: Sequence[tuple[int, int]], lens: Lens, has_overlay: bool
) -> list[Shown]:
    """Return images with several labels as the page shows them; those that are gone have an empty address.

    Args:
        answers: Of all test images.
        chosen: Which of them, each with one of the labels.
        lens: How to look at them.
        has_overlay: Whether to add a heat map of that label to each.
    """
    paths = [answers.paths[i] for i, _ in chosen]
    views = _views(paths, [k for _, k in chosen], lens, has_overlay)
    return [
        Shown(
            image,
            overlay,
            path,
            ", ".join(answers.named(answers.labels[i])),
            ", ".join(answers.named(answers.predicted[i])),
            float(answers.probabilities[i, k]),
            views.no_overlay,
            answers.class_names[k],
        )
        for (i, k), path, image, overlay in zip(
            chosen, paths, views.images, views.overlays, strict=True
        )
    ]


@dataclass(frozen=True)
class _Views:
    """Data URLs of images and heat maps; "" for those that are gone."""

    images: list[str]
    overlays: list[str]
    no_overlay: str


def _views(paths: Sequence[str], classes: Sequence[int], lens: Lens, has_overlay: bool) -> _Views:
    """Return images, and heat maps of a class for each if they are wanted."""
    side = _LARGE if has_overlay else _SMALL
    with ThreadPoolExecutor() as threads:
        seen = list(threads.map(lambda path: lens.see(path, side), paths))
        images = list(
            threads.map(lambda image: "" if image is None else thumbnail(image, side), seen)
        )
    there = [k for k, image in enumerate(seen) if image is not None]
    overlays = [""] * len(paths)
    no_overlay = ""
    if has_overlay and there:
        found = lens.overlay([paths[k] for k in there], [classes[k] for k in there], side)
        if isinstance(found, str):
            no_overlay = found
        else:
            for k, overlay in zip(there, found, strict=True):
                overlays[k] = thumbnail(overlay, side)
    return _Views(images, overlays, no_overlay)
