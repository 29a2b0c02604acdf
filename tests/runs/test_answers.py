"""test_predictions.csv, written by a fit and read back."""

import labels_folder
import numpy as np
import pytest
from labels_folder import write_labels_run
from run_folders import NAMES, write_run

from finetune.runs.answers import read_answers, read_label_answers

LABELS = [0, 0, 1, 2]
PREDICTED = np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.2, 0.5, 0.3], [0.3, 0.4, 0.3]])


def test_what_was_written_is_read(tmp_path):
    answers = read_answers(
        write_run(tmp_path / "run", LABELS, PREDICTED) / "test_predictions.csv", NAMES
    )
    assert answers.labels.tolist() == LABELS and answers.predicted.tolist() == [0, 1, 1, 1]
    assert answers.is_right.tolist() == [True, False, True, False]
    np.testing.assert_array_equal(answers.probabilities, PREDICTED)
    np.testing.assert_array_equal(answers.confidence, PREDICTED.max(axis=1))
    assert answers.unread == ["broken.png"] and len(answers.paths) == 4


def test_the_most_confident_of_a_cell_comes_first(tmp_path):
    output = np.array([[0.4, 0.6], [0.1, 0.9], [0.2, 0.8], [0.7, 0.3]])
    run = write_run(tmp_path / "run", [0, 0, 0, 0], output, ["a", "b"])
    answers = read_answers(run / "test_predictions.csv", ["a", "b"])
    assert answers.of(0, 1).tolist() == [1, 2, 0]
    assert answers.of(1, 0).tolist() == []


def test_the_best_five_of_very_many_classes(tmp_path):
    path = tmp_path / "test_predictions.csv"
    path.write_text(
        "path,label,class,probability,class_2,probability_2,error\nx.png,b,a,0.6,b,0.3,\n"
    )
    answers = read_answers(path, ["a", "b"])
    assert answers.probabilities is None and answers.confidence.tolist() == [0.6]


def test_labels_that_were_written_are_read(tmp_path):
    labels, p = labels_folder.drawn(20)
    for name in ("a", "b;c"):
        names = [name, "d", "e"]
        run = write_labels_run(tmp_path / name, labels, p, names)
        answers = read_label_answers(run / "test_predictions.csv", names)
        np.testing.assert_array_equal(answers.labels, labels)
        np.testing.assert_array_equal(answers.predicted, p >= labels_folder.THRESHOLDS)
        np.testing.assert_array_equal(answers.probabilities, p)
        assert answers.unread == ["broken.png"] and len(answers.paths) == 20
        right = (labels == answers.predicted).all(axis=1)
        np.testing.assert_array_equal(answers.is_right, right)
        assert 0 < right.sum() < 20
        assert answers.named(np.array([True, False, True])) == [name, "e"]


@pytest.mark.parametrize("names", [["other", "a", "b"], ["blue <b>"]])
def test_other_labels_are_refused(tmp_path, names):
    run = write_labels_run(tmp_path / "run", *labels_folder.drawn())
    with pytest.raises(ValueError, match="this run's labels"):
        read_label_answers(run / "test_predictions.csv", names)
