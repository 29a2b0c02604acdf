"""Properties of files that give away the class or the split. A network may use them instead of the image content.

The strength of a property says how well it alone separates one class (or split) from the rest. It is the recall of the
class plus the recall of the rest minus 1: 0 for guessing, 1 without errors. The rule uses quantiles of the property; it
is fitted on one half of the images and measured on the other.
"""

# Shapes: N images, K labels.

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from finetune.data.checking.image_facts import Facts

_NUM_QUANTILES = 12
_MIN_IMAGES = 20  # images of the class and of the rest; with fewer the strength is chance
# Different classes may look different. In five sets of ordinary photographs the highest strength is 0.65 for a class
# (aerial images of forest, by brightness) and 0.37 for a split.
MIN_OF_CLASS = 0.7
MIN_OF_SPLIT = 0.4


class Shortcut(NamedTuple):
    """A property that separates `name`, a class or a split, from the rest."""

    target: str  # class or split
    name: str
    what: str  # the property
    strength: float


def properties(facts: Facts) -> dict[str, NDArray]:
    """Return the value of each property for each image, (N,) numbers or strings."""
    height, width = np.maximum(facts.sizes, 1).T
    return {
        "brightness": facts.brightness,
        "image size": height * width,
        "aspect ratio": facts.aspects,
        "file size": facts.num_bytes,
        "bytes for each pixel": facts.num_bytes / (height * width),
        "file type": np.array(facts.kinds),
        "kind of pixels": np.array(facts.modes),
        # the day, because an archive is extracted class by class within a day
        "date of the files": facts.changed // 86_400,
    }


def shortcuts(
    facts: Facts, chosen: NDArray[np.int64], target: str, labels: np.ndarray, names: Sequence[str]
) -> list[Shortcut]:
    """Return the properties of the chosen images that give away a label, strongest first.

    Args:
        facts: Properties of all N images.
        chosen: Indices of the images to use.
        target: Kind of the labels: class or split.
        labels: Index into `names` of each image, (N,).
        names: Names of the labels.
    """
    least = MIN_OF_CLASS if target == "class" else MIN_OF_SPLIT
    found: list[Shortcut] = []
    if not len(chosen):
        return found
    for what, values in properties(facts).items():
        by_label = strengths(_cells(values[chosen]), labels[chosen], len(names))
        for label in np.flatnonzero(by_label >= least).tolist():
            found.append(Shortcut(target, names[label], what, round(float(by_label[label]), 2)))
    found.sort(key=lambda shortcut: -shortcut.strength)
    if target == "split" or len(names) == 2:  # with two labels the second is redundant
        found = list({shortcut.what: shortcut for shortcut in reversed(found)}.values())[::-1]
    return found


def strengths(
    cells: NDArray[np.integer], labels: NDArray[np.integer], num_labels: int
) -> NDArray[np.float64]:
    """Return the strength of a property for each label, (K,); 0 for labels with too few images.

    Args:
        cells: Index of the property's cell of each image, (N,).
        labels: Index of the label of each image, (N,).
        num_labels: K.
    """
    is_first = np.random.default_rng(0).random(len(cells)) < 0.5
    num_cells = int(cells.max()) + 1
    shape = (num_labels, num_cells)
    # for each half of the images, the number of images of each label in each cell, (K, cells)
    halves = [
        np.bincount(
            labels[half] * num_cells + cells[half], minlength=num_labels * num_cells
        ).reshape(shape)
        for half in (is_first, ~is_first)
    ]
    recalls = np.zeros(num_labels)  # of the label and of the rest, summed over both halves
    for fitted, measured in (halves, halves[::-1]):
        # a cell predicts a label if it has a larger share of the label's images than of the others
        is_predicted = _shares(fitted) > _shares(fitted.sum(axis=0) - fitted)
        others = measured.sum(axis=0) - measured
        recalls += (_shares(measured) * is_predicted).sum(axis=1)
        recalls += (_shares(others) * ~is_predicted).sum(axis=1)
    num_own = np.bincount(labels, minlength=num_labels)
    is_enough = np.minimum(num_own, len(cells) - num_own) >= _MIN_IMAGES
    return np.where(is_enough, np.maximum(0.0, recalls / 2 - 1), 0.0)


def _shares(counts: NDArray[np.integer]) -> NDArray[np.float64]:
    return counts / np.maximum(1, counts.sum(axis=1, keepdims=True))


def _cells(values: NDArray) -> NDArray[np.integer]:
    """Return the index of each value's cell, (N,): numbers are binned by quantiles, each text has its own cell."""
    if values.dtype.kind not in "US":
        edges = np.unique(np.quantile(values, np.linspace(0, 1, _NUM_QUANTILES + 1)[1:-1]))
        # A frequent value is an edge itself. It gets its own cell.
        return np.searchsorted(edges, values, "left") + np.searchsorted(edges, values, "right")
    return np.unique(values, return_inverse=True)[1]
