"""Which test images a report shows."""

import numpy as np
import pytest

from finetune.runs.answers import Answers
from finetune.runs.highlights import ImageViewer, kinds, max_per_cell, report_images


def answers(
    labels: list[int], predicted: list[int], confidence: list[float], num_classes: int = 2
) -> Answers:
    names, paths = (
        [f"class {i}" for i in range(num_classes)],
        [f"{i}.png" for i in range(len(labels))],
    )
    return Answers(
        names, paths, np.array(labels), np.array(predicted), np.array(confidence), None, []
    )


GIVEN = answers([0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 1], [0.9, 0.6, 0.7, 0.8, 0.95, 0.55])


def test_each_kind_begins_with_the_most_telling():
    mistakes, uncertain, best = (chosen.tolist() for _, _, chosen in kinds(GIVEN))
    assert mistakes == [4, 2]  # wrong ones alone, the surest first
    assert uncertain == [5, 1, 2, 3, 0, 4]
    assert best == [0, 3, 1, 5]  # a class at a time, its surest first


def test_all_images_of_a_small_split_are_in_its_cells():
    assert max_per_cell([2, 1, 1, 2]) == 2 and max_per_cell([]) == 0


@pytest.mark.parametrize("num", [1_000, 5_000, 100_000])
def test_a_page_of_very_many_stays_small(num):
    labels = np.arange(num) % 10
    predicted = np.where(np.arange(num) % 7, labels, (labels + 1) % 10)
    counts = np.bincount(labels * 10 + predicted)
    most = max_per_cell(counts.tolist())
    assert np.minimum(counts, most).sum() <= 600 and np.minimum(counts, most * 1.2 + 1).sum() > min(
        num, 500
    )


def test_images_in_order_with_their_words():
    def see(path: str, side: int) -> np.ndarray | None:
        return None if path == "2.png" else np.full((side, side, 3), 50, np.uint8)

    asked = []

    def overlay(paths, classes, side):
        asked.append((list(paths), list(classes)))
        return [np.full((side, side, 3), 50, np.uint8) for _ in paths]

    found = report_images(GIVEN, [4, 2, 0], ImageViewer(see, overlay), has_overlay=True)
    assert [(s.path, s.label, s.predicted, s.confidence) for s in found] == [
        ("4.png", "class 1", "class 0", 0.95),
        ("2.png", "class 0", "class 1", 0.7),
        ("0.png", "class 0", "class 0", 0.9),
    ]
    assert [bool(s.image) for s in found] == [bool(s.overlay) for s in found] == [True, False, True]
    assert asked == [(["4.png", "0.png"], [0, 0])]  # what was said, of those that are there
    assert (
        not report_images(GIVEN, [0], ImageViewer(see, overlay), has_overlay=False)[0].overlay
        and len(asked) == 1
    )
