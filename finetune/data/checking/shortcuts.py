"""Properties of files that give away the class or the split. A network may use them instead of the image content.

The strength of a property says how well it alone separates one class (or split) from the rest. It is the recall of the
class plus the recall of the rest minus 1: 0 for guessing, 1 without errors. The rule uses quantiles of the property; it
is fitted on one half of the images and measured on the other.
"""

# Shapes: N images, K labels.

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from finetune.data.checking.findings import Finding, Level, Row
from finetune.data.checking.image_facts import Facts
from finetune.system.messages import counted

_NUM_QUANTILES = 12
_MIN_IMAGES = 20  # images of the class and of the rest; with fewer the strength is chance


class _Target(NamedTuple):
    """What a finding says about a kind of labels, from which strength on."""

    least: float
    level: Level
    advice: str


# Different classes may look different: in five sets of ordinary photographs the highest strength is 0.65 for a class
# (aerial images of forest, by brightness) and 0.37 for a split.
_TARGETS = {
    "class": _Target(
        0.7,
        "warning",
        "A network learns whatever separates the classes most easily. If that is how images were made, not what they "
        "show, it fails on other images. Mix sources within each class, or convert all images in the same way.",
    ),
    "split": _Target(
        0.4,
        "note",
        "The splits were made from different sources or at different times: results on one say little about the other, "
        "unless that difference is what is to be tested.",
    ),
}


def shortcut_findings(
    facts: Facts, chosen: NDArray[np.int64], target: str, labels: np.ndarray, names: Sequence[str]
) -> Iterator[Finding]:
    """Yield a finding if properties of the chosen images give away a label; its rows are the strongest first.

    Args:
        facts: Properties of all N images.
        chosen: Indices of the images to use.
        target: Kind of the labels: class or split.
        labels: Index into `names` of each image, (N,).
        names: Names of the labels.
    """
    about = _TARGETS[target]
    rows: list[Row] = []
    for what, values in _properties(facts).items():
        by_label = strengths(_cells(values[chosen]), labels[chosen], len(names))
        found = np.flatnonzero(by_label >= about.least)
        if target == "split" or len(names) == 2:  # with two labels the second is redundant
            found = found[np.argsort(-by_label[found], kind="stable")][:1]
        for label in found.tolist():
            strength = float(by_label[label])
            text = (
                f"{what} distinguishes {names[label]} from the rest: strength {strength:.2f} of 1"
            )
            rows.append(Row([], text, strength))
    if rows:
        verb = "gives" if len(rows) == 1 else "give"
        properties = counted(len(rows), "property", "properties")
        title = f"{properties} of the files {verb} away the {target}"
        rows.sort(key=lambda row: -row.value)
        yield Finding(f"shortcut_{target}", about.level, title, about.advice, rows)


def _properties(facts: Facts) -> dict[str, NDArray]:
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
    shape = (num_labels, int(cells.max(initial=0)) + 1)
    # for each half of the images, the number of images of each label in each cell, (K, cells)
    halves = [np.zeros(shape, np.int64), np.zeros(shape, np.int64)]
    for counts, half in zip(halves, (is_first, ~is_first), strict=True):
        np.add.at(counts, (labels[half], cells[half]), 1)
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
    if values.dtype.kind not in "US" and len(values):
        edges = np.unique(np.quantile(values, np.linspace(0, 1, _NUM_QUANTILES + 1)[1:-1]))
        # A frequent value is an edge itself. It gets its own cell.
        return np.searchsorted(edges, values, "left") + np.searchsorted(edges, values, "right")
    return np.unique(values, return_inverse=True)[1]
