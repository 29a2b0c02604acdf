"""The test images of a page: the most informative ones, each with a class or label that it is shown for."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from finetune.inference.image_viewer import ImageViewer
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


def max_per_section(counts: Sequence[int]) -> int:
    """Return how many images a section may show, for a small page, from the number of images of each section."""
    most = max(counts, default=0)
    while most > 1 and sum(min(count, most) for count in counts) > _MOST:
        most = most * 9 // 10
    return most


@dataclass(frozen=True)
class Highlights:
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
    if predictions.is_single:
        yield from _of_classes(predictions)
    else:
        yield from _of_labels(predictions, np.array(thresholds))


def _of_classes(predictions: Predictions) -> Iterator[Highlights]:
    confidence = predictions.confidence
    decided = predictions.decided.argmax(axis=1)
    least_first = np.argsort(confidence, kind="stable")
    most_first = np.argsort(-confidence, kind="stable")
    is_right = predictions.is_right[most_first]
    wrong = most_first[~is_right]

    def shown(images: np.ndarray) -> list[tuple[int, int]]:
        return [(i, int(decided[i])) for i in images[:NUM_SHOWN].tolist()]

    yield Highlights(
        "Most confident mistakes",
        "Wrong with high confidence. Look here first for wrong labels and for kinds of images that training lacks.",
        shown(wrong),
        len(wrong),
    )
    yield Highlights(
        "Least certain",
        "The predictions with the lowest confidence. More training images like these help most.",
        shown(least_first),
    )
    yield Highlights(
        "Best examples",
        "Correct with the highest confidence, each class in turn.",
        shown(_in_turn(most_first[is_right], decided)),
    )


def _in_turn(chosen: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Return the indices in a new order: the first image of each class, then the second of each, and so on."""
    place = np.zeros(len(chosen), np.int64)
    for k in np.unique(classes[chosen]):
        of_class = classes[chosen] == k
        place[of_class] = np.arange(of_class.sum())
    return chosen[np.argsort(place, kind="stable")]


def _of_labels(predictions: Predictions, thresholds: np.ndarray) -> Iterator[Highlights]:
    p = predictions.probabilities
    false = predictions.decided & ~predictions.labels
    missed = predictions.labels & ~predictions.decided
    yield Highlights(
        "Most confident false predictions",
        "Predicted with a high probability, but the image does not have the label. Look here first for labels that "
        "were forgotten.",
        _first_pairs(-p, false),
        int(false.sum()),
    )
    yield Highlights(
        "Most confident misses",
        "The image has the label, but its probability is low. Look here for wrong labels and for kinds of images "
        "that training lacks.",
        _first_pairs(p, missed),
        int(missed.sum()),
    )
    yield Highlights(
        "Closest to the threshold",
        "The label is predicted or not by a small margin. More training images like these help most.",
        _first_pairs(np.abs(log_odds(p) - log_odds(thresholds)), np.ones_like(false)),
    )


def _first_pairs(value: np.ndarray, is_chosen: np.ndarray) -> list[tuple[int, int]]:
    """Return the pairs (image, label) with the lowest values, each image once.

    Args:
        value: (N, K).
        is_chosen: Which pairs to consider, (N, K).
    """
    images, labels = np.nonzero(is_chosen)
    pairs: dict[int, int] = {}
    for i in np.argsort(value[images, labels], kind="stable"):
        pairs.setdefault(int(images[i]), int(labels[i]))
        if len(pairs) == NUM_SHOWN:
            break
    return list(pairs.items())


def log_odds(p: np.ndarray) -> np.ndarray:
    """Return the log odds of probabilities. 0 and 1 give large finite ones."""
    p = p.clip(_TINY, 1 - _TINY)
    return np.log(p / (1 - p))
