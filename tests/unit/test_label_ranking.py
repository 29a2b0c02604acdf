"""The ranking of doubtful labels is that of scikit-learn with the same folds; no image decides its own label."""

import tracemalloc

import numpy as np
import pytest
from reviews import begin_review, job_of
from sklearn.linear_model import LogisticRegression

from finetune.data.checking.copies import Pair
from finetune.data.datasets.scan import scan
from finetune.data.targets import MultiHot
from finetune.features.label_errors import (
    STRENGTH,
    label_findings,
    out_of_fold,
    rank_labels,
)
from finetune.features.logistic_regression import NUM_FOLDS, deal_folds
from finetune.review.ranking_job import ImageFacts


def blobs(num: int = 300, num_classes: int = 3, size: int = 8, spread: float = 1.0):
    """Features around a centre for each class, and the classes."""
    rng = np.random.default_rng(0)
    labels = np.arange(num) % num_classes
    centres = 2 * rng.normal(size=(num_classes, size))
    return centres[labels] + spread * rng.normal(size=(num, size)), labels


def several_blobs(num: int = 300, num_labels: int = 4, size: int = 12):
    """Features that are the sum of a direction for each label, and the labels."""
    rng = np.random.default_rng(0)
    has_label = (rng.random((num, num_labels)) < [0.5, 0.3, 0.2, 0.1]).astype(np.int64)
    directions = 4 * rng.normal(size=(num_labels, size))
    return has_label @ directions + rng.normal(size=(num, size)), has_label


@pytest.mark.parametrize("has_several", [False, True])
def test_probabilities_are_scikit_learns_with_the_same_folds(has_several):
    features, labels = several_blobs() if has_several else blobs(spread=3)
    if has_several:
        features += 6 * np.random.default_rng(1).normal(size=features.shape)
    groups = np.arange(300)
    found = out_of_fold(features, labels, groups, 4 if has_several else 3)
    strata = MultiHot(labels.astype(np.uint8)).strata() if has_several else labels
    folds = deal_folds(strata, groups)
    for fold in range(1 if has_several else NUM_FOLDS):
        rest, held_out = folds != fold, folds == fold
        x = features - features[rest].mean(axis=0)
        x /= np.sqrt((x[rest] ** 2).sum(axis=1).mean())
        # Its penalty is a half of the weights' squares against C times the sum of losses.
        other = LogisticRegression(C=1 / (STRENGTH * rest.sum()), tol=1e-10, max_iter=10_000)
        if has_several:
            heads = [other.fit(x[rest], y[rest]).predict_proba(x[held_out])[:, 1] for y in labels.T]
            expected = np.stack(heads, axis=1)
        else:
            expected = other.fit(x[rest], labels[rest]).predict_proba(x[held_out])
        np.testing.assert_allclose(found[held_out], expected, atol=1e-3 if has_several else 1e-5)


def test_planted_errors_of_several_labels_come_first_and_rare_labels_are_skipped():
    features, has_label = several_blobs()
    changed = [(7, 0), (20, 1), (33, 2), (140, 3), (250, 1)]
    stated = has_label.copy()
    for i, k in changed:
        stated[i, k] = 1 - stated[i, k]
    groups = np.arange(300)
    ranked = rank_labels(out_of_fold(features, stated, groups, 4), stated, groups)
    assert {*map(tuple, ranked[:5].tolist())} == {*changed}
    # the control: without changes they are anywhere
    ranked = rank_labels(out_of_fold(features, has_label, groups, 4), has_label, groups)
    assert len({*map(tuple, ranked[:5].tolist())} & {*changed}) < 3
    rare = stated.copy()
    rare[:, 3] = 0
    rare[:4, 3] = 1
    ranked = rank_labels(out_of_fold(features, rare, groups, 4), rare, groups)
    assert 3 not in ranked[:, 1] and len(ranked) == 3 * 300


def test_classes_smaller_than_the_folds_are_not_doubted_nor_those_of_copies():
    features, labels = blobs(34)
    labels[30:] = 3
    found = rank_labels(out_of_fold(features, labels, np.arange(34), 4), labels, np.arange(34))
    assert sorted(found[:, 0]) == list(range(30))
    # Copies are held out together, so the head was fitted on no other image of their class.
    features, labels = blobs(38)
    labels[30:] = 3
    groups = np.array([*range(30), *[30] * 8])
    probabilities = out_of_fold(features, labels, groups, 4)
    assert sorted(rank_labels(probabilities, labels, groups)[:, 0]) == list(range(30))
    # The control: taken one by one they are doubted, and most come first.
    one_by_one = rank_labels(probabilities, labels, np.arange(38))[:8, 0]
    assert len({*one_by_one} & {*range(30, 38)}) > 5
    features, labels = blobs(12)  # all are copies of one
    assert out_of_fold(features, labels, np.zeros(12, int), 3).tolist() == [[0.0] * 3] * 12


def test_a_ranking_of_many_classes_takes_less_memory_than_their_probabilities():
    probabilities = np.full((4000, 500), 1 / 500)
    tracemalloc.start()
    ranked = rank_labels(probabilities, np.arange(4000) % 500, np.arange(4000))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(ranked) == 4000 and most < probabilities.nbytes / 2


def test_a_finding_names_the_file_and_both_classes_and_a_copy_is_no_witness(tmp_path):
    features, labels = blobs(60)
    features[59] = features[0]  # a copy of image 0, in the class of 59
    for i, label in enumerate(labels):
        (tmp_path / "abc"[label]).mkdir(exist_ok=True)
        (tmp_path / "abc"[label] / f"{i:02}.jpg").touch()
    data = scan(str(tmp_path))
    order = [int(path[-6:-4]) for path in data.paths]  # listed class by class
    i, j = sorted((order.index(0), order.index(59)))
    pairs = [Pair(i, j, 1.0, False, 1.0)]
    (finding,) = label_findings(data, np.arange(60), features[order], pairs)
    assert not finding.is_judged and finding.rows[0].images == [order.index(59)]
    note = finding.rows[0].note
    assert note.startswith("c by its folder (0.0") and ", a by the others (" in note
    values = [row.value for row in finding.rows]
    assert values == sorted(values, reverse=True)
    # one class alone
    assert [*label_findings(data, np.arange(20), features[order][:20], [])] == []


@pytest.mark.parametrize("has_groups", [True, False])
@pytest.mark.parametrize("has_several", [False, True])
def test_other_images_of_a_group_do_not_hide_its_wrong_label(tmp_path, has_groups, has_several):
    """Each of 12 patients has 5 near-copies; the label of the first one is wrong."""
    patients = np.repeat(np.arange(12), 5)
    is_ill = patients % 2
    features = np.column_stack([4 * is_ill, 9 * np.eye(12)[patients]])
    rows = ["path,label,group" if has_groups else "path,label"]
    for i, patient in enumerate(patients.tolist()):
        (tmp_path / f"{i:02}.jpg").touch()
        label = ("well", "ill")[is_ill[i] if patient else 1]
        label = f"any;{label}" if has_several else label
        rows.append(f"{i:02}.jpg,{label},{patient}" if has_groups else f"{i:02}.jpg,{label}")
    (tmp_path / "table.csv").write_text("\n".join(rows) + "\n")

    # the ranking of finetune check
    data = scan(str(tmp_path / "table.csv"))
    order = [int(path[-6:-4]) for path in data.paths]
    findings = [*label_findings(data, np.arange(60), features[order], [])]
    doubted = {order[row.images[0]] for finding in findings for row in finding.rows}

    # the ranking of finetune review
    session = begin_review(tmp_path / "table.csv")
    job = job_of(session, has_network=False)
    shown = [int(name[:2]) for name in session.images.names()]
    job.facts = ImageFacts([], {}, np.arange(60), features[shown])
    job.rank()
    assert not job.error
    reviewed = {shown[i] for i in session.order.reasons}

    # the control: without the column the near-copies of the patient confirm its label
    wrong = set(range(5)) if has_groups else set()
    assert doubted == reviewed == wrong
