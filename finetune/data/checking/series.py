"""Series of images, such as bursts or video frames: numbered names, and neighbours that look alike.

Numbers alone are no evidence, since many sets are numbered in any order. A set has series if images with consecutive
numbers look more alike than other images of their class.
"""

# Shapes: N images, P pairs.

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

import cv2
import numpy as np

from finetune.data.checking.findings import Finding, Row
from finetune.data.checking.image_facts import Facts
from finetune.data.data_set import DataSet
from finetune.system.messages import counted

# A file's last number, and what is before it.
_NUMBERED = re.compile(r"(.*?)(\d{1,18})\.[^./]*", re.DOTALL)
_MAX_PAIRS = 4000
_MIN_PAIRS = 30  # with fewer, the likeness is chance
_SIDE = 12  # pixels of the copies that are compared
# Images of one series whose numbers differ by less are not compared as "other images of the class".
_FAR = 20
# How often neighbours are more alike than others; chance is 0.5.
MIN_LIKENESS = 0.75
_MIN_PER_CLASS = 3  # series or folders of each class, on average; with fewer, their names may be those of the classes
_NUM_EXAMPLES = 20


def series_findings(data: DataSet, facts: Facts, chosen: np.ndarray) -> Iterator[Finding]:
    """Yield a finding if the data set has series that are in several splits, or that a random split would tear apart.

    Args:
        data: The data set.
        facts: Properties of its images.
        chosen: Indices of the images that show something.
    """
    # from beneath the class folder on
    names = [data.from_class(data.name(int(i))).split("/", 1)[-1] for i in chosen]
    rows, series, numbers = _numbered(names, chosen, data.set_of[chosen])
    first = np.flatnonzero((np.diff(series) == 0) & (np.diff(numbers) == 1))
    if data.has_splits:
        split_of = data.split_of[rows]
        first = first[split_of[first] != split_of[first + 1]]
    if len(first) < _MIN_PAIRS:
        return
    if len(first) > _MAX_PAIRS:
        first = first[np.linspace(0, len(first) - 1, _MAX_PAIRS).astype(int)]
    other = _others_of_class(data.set_of[rows], first)
    is_far = (series[other] != series[first]) | (np.abs(numbers[other] - numbers[first]) >= _FAR)
    copies = _small_copies(facts, rows)
    alike = (copies[first] * copies[first + 1]).sum(axis=1)
    usual = np.sort((copies[first] * copies[other]).sum(axis=1)[is_far])
    # how often a neighbour is more alike than another image (Mann-Whitney)
    below = np.searchsorted(usual, alike, "left") + np.searchsorted(usual, alike, "right")
    likeness = float(below.mean()) / (2 * max(1, len(usual)))
    if len(usual) < _MIN_PAIRS or likeness < MIN_LIKENESS:
        return
    num = counted(len(np.unique(series[first])), "series", "series")
    where = "would be torn apart by a random split"
    advice = (
        f"Images with consecutive numbers are more alike than others of their class ({likeness:.0%} of comparisons, by "
        "chance 50 %). If a network is trained on some images of a series and tested on others, results are too good. "
    )
    if data.has_splits:
        where = "lie in more than one split"
        advice += "Put each series into one split, or pass class folders without splits. "
    yield Finding(
        "series",
        "warning",
        f"{num} of images, such as bursts or video frames, {where}",
        advice + _option(names, data.set_of[chosen], len(data.class_names)),
        [
            Row(
                rows[[first[k], first[k] + 1]].tolist(),
                f"similarity {alike[k]:.2f}",
                float(alike[k]),
            )
            for k in np.argsort(-alike, kind="stable")[:_NUM_EXAMPLES]
        ],
    )


def _numbered(
    names: Sequence[str], rows: np.ndarray, class_of: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the images whose names end in a number, their series and their numbers, sorted by these, (N,) each.

    A series is the class, and the path beneath the class without the number.
    """
    index: dict[tuple[int, str], int] = {}
    found: list[tuple[int, int, int]] = []
    for row, name, k in zip(rows.tolist(), names, class_of.tolist(), strict=True):
        if match := _NUMBERED.fullmatch(name):
            found.append((index.setdefault((k, match[1]), len(index)), int(match[2]), row))
    table = np.array(sorted(found), np.int64).reshape(-1, 3)
    return table[:, 2], table[:, 0], table[:, 1]


def _others_of_class(class_of: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return a random image of the class of each image in `first`, (P,)."""
    order = np.argsort(class_of, kind="stable")
    low = np.searchsorted(class_of[order], class_of[first], "left")
    high = np.searchsorted(class_of[order], class_of[first], "right")
    shares = np.random.default_rng(0).random(len(first))
    return order[low + (shares * (high - low)).astype(np.int64)]


def _small_copies(facts: Facts, rows: np.ndarray) -> np.ndarray:
    """Return small grey copies with mean 0 and length 1, (N, pixels): their products are correlations."""
    small = [cv2.resize(facts.grey[i], (_SIDE, _SIDE), interpolation=cv2.INTER_AREA) for i in rows]
    copies = np.array(small, np.float32).reshape(len(rows), -1)
    copies -= copies.mean(axis=1, keepdims=True)
    length = np.linalg.norm(copies, axis=1, keepdims=True)
    return np.asarray(copies / np.maximum(length, 1e-6))


def _option(names: Sequence[str], class_of: np.ndarray, num_classes: int) -> str:
    """Return the option of `fit` that keeps the series together."""
    folders = set()
    prefixes = set()
    for k, path in zip(class_of.tolist(), map(PurePosixPath, names), strict=True):
        if len(path.parts) > 1:
            folders.add((k, path.parent))
        if match := _NUMBERED.fullmatch(path.name):
            prefixes.add((k, match[1]))
    if len(folders) >= _MIN_PER_CLASS * num_classes:
        return "finetune fit --data.group_by folder keeps the images of a folder beneath the class together."
    if len(prefixes) >= _MIN_PER_CLASS * num_classes:
        return (
            r"finetune fit --data.group_by '([^/]*?)\d+\.\w+$' keeps images together whose names differ by the last "
            "number."
        )
    return (
        "Put each series into a folder of its own beneath its class: finetune fit --data.group_by folder keeps its "
        "images together."
    )
