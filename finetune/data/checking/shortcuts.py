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
    """Return the strength of a binned property for each label, (K,); 0 for labels with too few images."""
    is_first = np.random.default_rng(0).random(len(cells)) < 0.5
    num = int(cells.max()) + 1
    size = num_labels * (int(cells.max()) + 1)
    # Number of images of each label in each cell, (K, cells), and of all other labels.
    of_label = [
        np.bincount(labels[half] * num + cells[half], minlength=size).reshape(num_labels, num)
        for half in (is_first, ~is_first)
    ]
    sides = [(counts, counts.sum(axis=0) - counts) for counts in of_label]
    right = np.zeros(num_labels)
    for fitted, (own, others) in zip(sides, sides[::-1], strict=True):
        says = _shares(fitted[0]) > _shares(fitted[1])
        right += (_shares(own) * says).sum(axis=1) + (_shares(others) * ~says).sum(axis=1)
    num_own = np.bincount(labels, minlength=num_labels)
    is_enough = np.minimum(num_own, len(cells) - num_own) >= _MIN_IMAGES
    return np.where(is_enough, np.maximum(0.0, right / 2 - 1), 0.0)


def _shares(counts: NDArray[np.integer]) -> NDArray[np.float64]:
    return counts / np.maximum(1, counts.sum(axis=1, keepdims=True))


def _cells(values: NDArray) -> NDArray[np.integer]:
    if values.dtype.kind not in "US":
        edges = np.unique(np.quantile(values, np.linspace(0, 1, _NUM_QUANTILES + 1)[1:-1]))
        # A frequent value is an edge itself. It gets its own cell.
        return np.searchsorted(edges, values, "left") + np.searchsorted(edges, values, "right")
    return np.unique(values, return_inverse=True)[1]
