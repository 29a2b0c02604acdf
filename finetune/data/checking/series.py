"""Series of images, such as bursts or video frames: numbered names, and neighbours that look alike.

Numbers alone are no evidence, since many sets are numbered in any order. A set has series if images with consecutive
numbers look more alike than other images of their class.
"""

# Shapes: N images, P pairs.

import re
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Numbered:
    """The images whose names end in a number, sorted by class, series and number, (N,) each.

    Attributes:
        rows: Index of each image in the data set.
        series: Index of its series: the class, and the path beneath the class without the number.
        numbers: Its number.
    """

    rows: np.ndarray
    series: np.ndarray
    numbers: np.ndarray

    def neighbours(self) -> np.ndarray:
        """Return the pairs of images of one series with consecutive numbers, (P, 2) indices into `rows`."""
        is_next = (np.diff(self.series) == 0) & (np.diff(self.numbers) == 1)
        first = np.flatnonzero(is_next)
        return np.stack([first, first + 1], axis=1)


def series_findings(data: DataSet, facts: Facts, chosen: np.ndarray) -> Iterator[Finding]:
    """Yield a finding if the data set has series that are in several splits, or that a random split would tear apart.

    Args:
        data: The data set.
        facts: Properties of its images.
        chosen: Indices of the images that show something.
    """
    has_splits = data.has_splits
    # from beneath the class folder on
    names = [data.from_class(data.name(int(i))).split("/", 1)[-1] for i in chosen]
    numbered = _numbered(names, chosen, data.set_of[chosen])
    pairs = numbered.neighbours()
    if has_splits:
        split_of = data.split_of[numbered.rows]
        pairs = pairs[split_of[pairs[:, 0]] != split_of[pairs[:, 1]]]
    if len(pairs) < _MIN_PAIRS:
        return
    if len(pairs) > _MAX_PAIRS:
        pairs = pairs[np.linspace(0, len(pairs) - 1, _MAX_PAIRS).astype(int)]
    others = _pairs_of_others(numbered, data.set_of[numbered.rows], pairs)
    copies = _copies(facts, numbered.rows)
    alike = (copies[pairs[:, 0]] * copies[pairs[:, 1]]).sum(axis=1)
    usual = (copies[others[:, 0]] * copies[others[:, 1]]).sum(axis=1)
    likeness = _share_above(alike, usual)
    if len(others) < _MIN_PAIRS or likeness < MIN_LIKENESS:
        return
    num = len(np.unique(numbered.series[pairs[:, 0]]))
    best = np.argsort(-alike, kind="stable")[:_NUM_EXAMPLES]
    where = "lie in more than one split" if has_splits else "would be torn apart by a random split"
    yield Finding(
        "series",
        "warning",
        f"{counted(num, 'series', 'series')} of images, such as bursts or video frames, {where}",
        f"Images with consecutive numbers are more alike than others of their class ({likeness:.0%} of comparisons, by "
        "chance 50 %). If a network is trained on some images of a series and tested on others, results are too good. "
        + (
            "Put each series into one split, or pass class folders without splits. "
            if has_splits
            else ""
        )
        + _advice(names, data.set_of[chosen], len(data.class_names)),
        [
            Row(numbered.rows[pairs[i]].tolist(), f"similarity {alike[i]:.2f}", float(alike[i]))
            for i in best
        ],
    )


def _numbered(names: list[str], rows: np.ndarray, class_of: np.ndarray) -> _Numbered:
    matches = [_NUMBERED.fullmatch(name) for name in names]
    found = [i for i, match in enumerate(matches) if match]
    index: dict[tuple[int, str], int] = {}
    series = np.zeros(len(found), np.int64)
    numbers = np.zeros(len(found), np.int64)
    for place, i in enumerate(found):
        match = matches[i]
        assert match is not None
        series[place] = index.setdefault((int(class_of[i]), match[1]), len(index))
        numbers[place] = int(match[2])
    order = np.lexsort([numbers, series])
    return _Numbered(rows[np.array(found, np.int64)][order], series[order], numbers[order])


def _pairs_of_others(numbered: _Numbered, class_of: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Return pairs of images of one class that are not near each other in a series, (P', 2), at random."""
    generator = np.random.default_rng(0)
    order = np.argsort(class_of, kind="stable")
    low = np.searchsorted(class_of[order], class_of[pairs[:, 0]], "left")
    high = np.searchsorted(class_of[order], class_of[pairs[:, 0]], "right")
    other = order[low + (generator.random(len(pairs)) * (high - low)).astype(np.int64)]
    is_near = numbered.series[other] == numbered.series[pairs[:, 0]]
    is_near &= np.abs(numbered.numbers[other] - numbered.numbers[pairs[:, 0]]) < _FAR
    return np.stack([pairs[:, 0], other], axis=1)[~is_near]


def _copies(facts: Facts, rows: np.ndarray) -> np.ndarray:
    """Return small grey copies with mean 0 and length 1, (N, pixels): their products are correlations."""
    small = [
        cv2.resize(facts.grey[i], (_SIDE, _SIDE), interpolation=cv2.INTER_AREA).ravel()
        for i in rows
    ]
    copies = np.array(small, np.float32).reshape(len(rows), -1)
    copies -= copies.mean(axis=1, keepdims=True)
    length = np.linalg.norm(copies, axis=1, keepdims=True)
    return np.asarray(copies / np.maximum(length, 1e-6))


def _share_above(values: np.ndarray, others: np.ndarray) -> float:
    """Return how often a value is above one of the others (Mann-Whitney)."""
    ordered = np.sort(others)
    below = np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")
    return float(below.mean()) / (2 * max(1, len(others)))


def _advice(names: list[str], class_of: np.ndarray, num_classes: int) -> str:
    """Return the option of `fit` that keeps the series together."""
    paths = [PurePosixPath(name) for name in names]
    folders = {
        (int(k), str(path.parent))
        for k, path in zip(class_of, paths, strict=True)
        if len(path.parts) > 1
    }
    if len(folders) >= _MIN_PER_CLASS * num_classes:
        return "finetune fit --data.group_by folder keeps the images of a folder beneath the class together."
    matches = [(k, _NUMBERED.fullmatch(path.name)) for k, path in zip(class_of, paths, strict=True)]
    prefixes = {(int(k), match[1]) for k, match in matches if match}
    if len(prefixes) >= _MIN_PER_CLASS * num_classes:
        return (
            r"finetune fit --data.group_by '([^/]*?)\d+\.\w+$' keeps images together whose names differ by the last "
            "number."
        )
    return (
        "Put each series into a folder of its own beneath its class: finetune fit --data.group_by folder keeps its "
        "images together."
    )
