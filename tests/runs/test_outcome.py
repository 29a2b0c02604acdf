"""The result of an evaluation in a line, and a row for each of several labels."""

import numpy as np
import pytest

from finetune.runs.best_epoch import num_trials_of_labels, standard_error
from finetune.runs.outcome import label_rows, outcome_line
from finetune.runs.statistics import wilson

RESULT = {
    "class_names": ["cup", "fork", "plate"],
    # true negatives, false positives, false negatives, true positives
    "label_counts": [[[50, 10], [8, 32]], [[90, 0], [10, 0]], [[95, 5], [0, 0]]],
    "val/mAP": 0.6,
    "val/exact_match": 0.5,
    "val/average_precision/cup": 0.8,
    "val/average_precision/fork": 0.4,
    "val/average_precision/plate": None,
}


def test_each_label_has_a_row_with_intervals():
    cup, fork, plate = label_rows(RESULT, "val")
    assert (cup.name, cup.num_images, cup.num_predicted) == ("cup", 40, 42)
    assert cup.precision == (32 / 42, *wilson(32, 42)) and cup.recall == (0.8, *wilson(32, 40))
    assert cup.average_precision == pytest.approx((0.8, *wilson(32, 40)))
    assert fork.precision is None and fork.recall == (0.0, *wilson(0, 10))
    assert plate.recall is None and plate.average_precision is None
    assert plate.precision == (0.0, *wilson(0, 5))


def test_a_line_has_the_mean_average_precision_with_its_interval():
    num_trials = num_trials_of_labels(np.array([40, 10, 0]))
    low, high = wilson(0.6 * num_trials, num_trials)
    assert outcome_line(RESULT, "val") == (
        f"validation mAP 0.600 (95 % interval {low:.3f}–{high:.3f}), on 100 images; exact match 50.0 %"
    )
    computed = {**RESULT, "mAP_interval": [0.4, 0.7]}
    assert "0.600 (95 % interval 0.400–0.700)" in outcome_line(computed, "val")
    assert outcome_line({**RESULT, "val/mAP": None}, "val") == ""
    assert outcome_line({}) == ""


def test_a_line_has_the_accuracy_of_one_class_an_image():
    line = outcome_line({"confusion_matrix": [[3, 1], [0, 4]]})
    assert line.startswith("test accuracy 87.5 % (7 of 8; ")


def test_trials_give_the_standard_error_of_a_mean_of_independent_shares():
    counts = np.array([40, 10, 0, 25])
    expected = np.sqrt(sum(0.6 * 0.4 / n for n in (40, 10, 25))) / 3
    assert standard_error(0.6, num_trials_of_labels(counts)) == pytest.approx(expected)
    assert num_trials_of_labels(np.array([7])) == pytest.approx(7)  # a single label
    assert num_trials_of_labels(np.zeros(3, int)) == 0
