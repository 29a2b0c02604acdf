"""Properties that reveal a class are found where they were planted, and nowhere else."""

import numpy as np
import pytest
from drawings import facts_of

from finetune.data.checking.shortcuts import MIN_OF_CLASS, properties, shortcuts, strengths


def strength_of_one(cells, is_it):
    """As its docstring has it, for one label: the rule of each half measured on the other."""
    is_first = np.random.default_rng(0).random(len(cells)) < 0.5
    right = 0.0
    for fitted in (is_first, ~is_first):
        for side, wanted in ((is_it, True), (~is_it, False)):
            answers = []
            for cell in cells[~fitted & side]:
                own, rest = ((cells[fitted & s] == cell).mean() for s in (is_it, ~is_it))
                answers.append((own > rest) == wanted)
            right += float(np.mean(answers))
    return max(0.0, right / 2 - 1)


def test_all_labels_at_once_are_each_by_itself():
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 4, 400)
    cells = np.where(rng.random(400) < 0.6, labels, rng.integers(0, 6, 400))
    wanted = [strength_of_one(cells, labels == label) for label in range(4)]
    np.testing.assert_allclose(strengths(cells, labels, 5), [*wanted, 0], atol=1e-12)
    assert min(wanted) > 0.4


def test_chance_has_no_strength_and_a_rule_without_errors_has_one():
    """Guessing is right for half of the N images of each side, with a deviation of 0.5 / sqrt(N): six of them."""
    num = 4000
    for seed in range(5):
        labels, cells = np.random.default_rng(seed + 1).integers(0, (2, 12), (num, 2)).T
        assert strengths(cells, labels, 2).max() < 6 * 0.5 / np.sqrt(num / 2) * 2
    assert strengths(labels + 3, labels, 2).tolist() == [1, 1]


def test_of_few_images_nothing_is_reported():
    labels = np.repeat([0, 1], [19, 400])
    assert strengths(labels, labels, 2).tolist() == [0, 0]
    labels = np.repeat([0, 1], [20, 400])
    assert strengths(labels, labels, 2).tolist() == [1, 1]


def test_a_planted_property_is_named_and_no_other(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], 60)
    grey = rng.integers(0, 256, (180, 48, 48)).astype(np.uint8)
    facts = facts_of(
        grey, num_bytes=rng.integers(4000, 6000, 180), sizes=rng.integers(100, 200, (180, 2))
    )
    assert shortcuts(facts, np.arange(180), "class", labels, "abc") == []  # the control
    facts.kinds[60:120] = ["PNG"] * 60
    (found,) = shortcuts(facts, np.arange(180), "class", labels, "abc")
    assert (found.name, found.what, found.strength) == ("b", "file type", 1)
    by_half = shortcuts(facts, np.arange(120), "class", labels, "ab")
    assert len(by_half) == 1  # of two classes the second says the same again
    assert shortcuts(facts, np.arange(0), "class", labels, "abc") == []


def test_a_value_that_half_share_is_a_cell_of_its_own():
    labels = np.repeat([0, 1], 100)
    # all of one class on one day
    changed = np.where(labels, np.arange(200) * 86_400.0, 7 * 86_400.0)
    facts = facts_of(np.zeros((200, 48, 48), np.uint8), changed=changed)
    (found,) = shortcuts(facts, np.arange(200), "class", labels, "ab")
    assert found.what == "date of the files" and found.strength > 0.9 > MIN_OF_CLASS
    assert len(properties(facts)) == 8


@pytest.mark.parametrize("target", ["class", "split"])
def test_as_many_classes_as_images_allow_take_no_time(target):
    labels = np.arange(60_000) % 3000
    facts = facts_of(np.zeros((60_000, 1, 1), np.uint8), num_bytes=labels)
    found = shortcuts(facts, np.arange(60_000), target, labels, [str(i) for i in range(3000)])
    assert {shortcut.what for shortcut in found} <= {"file size", "bytes for each pixel"} and found
