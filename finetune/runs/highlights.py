"""Which test pictures a report shows, and how: small ones for each cell of the matrix, larger ones where it matters."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from finetune.runs.answers import Answers
from finetune.system.html_page import thumbnail

# Shapes: N test pictures, K classes, h and w pixels.

NUM_SHOWN = 12  # of each kind
_SMALL, _LARGE = 84, 144  # pixels: of a picture in a cell, and of one that is looked at
_MOST = 1000  # pictures in all cells together: 5 MB of a page at about 4 kB each


@dataclass(frozen=True)
class Lens:
    """What lets a report look at pictures.

    Attributes:
        see: Gives the picture of a path as (h, w, 3) uint8, as the network sees it but so many pixels wide; None where
            there is none any more.
        overlay: Gives for pictures and a class each where the network saw it, (h, w, 3) uint8 so many pixels wide;
            None where that can't be told of this network.
    """

    see: Callable[[str, int], np.ndarray | None]
    overlay: Callable[[Sequence[str], Sequence[int], int], list[np.ndarray] | None]


@dataclass(frozen=True)
class Shown:
    """A picture on the page: addresses that hold it, and the words below."""

    image: str
    overlay: str
    path: str
    label: str
    predicted: str
    confidence: float


def kinds(answers: Answers) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield what is worth looking at: a heading, a sentence, and the pictures, the most telling first."""
    right, confidence = answers.is_right, answers.confidence
    wrong = np.flatnonzero(~right)
    yield (
        "Most confident mistakes",
        "Wrong, and sure of it: look here first for wrong labels and for what the training pictures lack.",
        wrong[np.argsort(-confidence[wrong], kind="stable")],
    )
    yield (
        "Least certain",
        "Right or wrong, nearly by chance: pictures like these teach most when they are added to training.",
        np.argsort(confidence, kind="stable"),
    )
    best = np.flatnonzero(right)
    yield (
        "Best examples",
        "Right, and most certain, of each class in turn.",
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
        has_overlay: Whether to show them larger, and where the network saw the class that it said.
    """
    paths = [answers.paths[i] for i in chosen]
    side = _LARGE if has_overlay else _SMALL
    with ThreadPoolExecutor() as threads:
        seen = list(threads.map(lambda path: lens.see(path, side), paths))
        images = list(
            threads.map(lambda image: "" if image is None else thumbnail(image, side), seen)
        )
    there = [k for k, image in enumerate(seen) if image is not None]
    overlays = [""] * len(paths)
    if has_overlay and there:
        found = lens.overlay(
            [paths[k] for k in there], [int(answers.predicted[chosen[k]]) for k in there], side
        )
        for k, overlay in zip(there, found or (), strict=bool(found)):
            overlays[k] = thumbnail(overlay, side)
    names = answers.class_names
    return [
        Shown(
            image,
            overlay,
            path,
            names[answers.labels[i]],
            names[answers.predicted[i]],
            float(answers.confidence[i]),
        )
        for i, path, image, overlay in zip(chosen, paths, images, overlays, strict=True)
    ]
