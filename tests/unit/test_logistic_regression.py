"""The head on fixed features is scikit-learn's logistic regression, for any weights, smoothing, strength and labels."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit, log_softmax, softmax
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score

from finetune.data.targets import MultiHot
from finetune.features.logistic_regression import STRENGTHS, Probe, deal_folds, fit_probe


def sample_images(
    num: int, num_features: int, num_classes: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Features like a network's: overlapping classes, positive, of very different sizes, one of them dead."""
    centres = np.random.default_rng(99).normal(size=(num_classes, num_features))
    rng = np.random.default_rng(seed)
    labels = rng.integers(num_classes, size=num)
    features = np.maximum(0, centres[labels] + 2 * rng.normal(size=(num, num_features)))
    features *= np.logspace(0, -2, num_features)
    features[:, -1] = 0
    return features, labels


def several(
    num: int, num_features: int, num_labels: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Features as above, with several labels or none for each image; the last label is rare."""
    features, _ = sample_images(num, num_features, num_labels, seed)
    rng = np.random.default_rng(seed + 1)
    logits = features @ rng.normal(size=(num_features, num_labels)) / scaled(features)[1]
    logits += rng.logistic(size=logits.shape) - np.quantile(logits, 0.6, axis=0)
    logits[:, -1] -= 1.5
    return features, (logits > 0).astype(np.float32)


def scaled(features: np.ndarray, weights: np.ndarray | None = None) -> tuple[np.ndarray, float]:
    """The features as the docstring scales them, and the number that they are divided by."""
    centred = features - np.average(features, axis=0, weights=weights)
    size = np.sqrt(np.average((centred**2).sum(axis=1), weights=weights))
    return centred / size, size


def logits(probe: Probe, features: np.ndarray) -> np.ndarray:
    return features @ probe.weight.T + probe.bias


def by_sklearn(features, labels, num_classes, strength, class_weights, smoothing, image_weights):
    """The probabilities of scikit-learn, which takes each image once for each class, with the target as its weight."""
    w, images = np.asarray(class_weights), np.asarray(image_weights)
    x, _ = scaled(features, images)
    solver = {"tol": 1e-12, "max_iter": 1000, "solver": "newton-cholesky"}
    if labels.ndim == 1:
        targets = (1 - smoothing) * np.eye(num_classes)[labels] * w + smoothing / num_classes * w
        total = (images * w[labels]).sum()
        rows, ks = np.nonzero(targets)
        # For two classes it has one row, 2 w, where ours are +w and -w: the penalty of the two is half of that of one.
        c = (2 if num_classes == 2 else 1) / (total * strength)
        other = LogisticRegression(C=c, **solver)
        other.fit(x[rows], ks, sample_weight=(images[:, None] * targets)[rows, ks])
        return other.predict_proba(x)
    found = []
    for k in range(num_classes):
        wanted = labels[:, k].astype(float) * (1 - smoothing) + smoothing / 2
        weights = np.concatenate([images * w[k] * wanted, images * (1 - wanted)])
        other = LogisticRegression(C=1 / (images.sum() * strength), **solver)
        rows = np.flatnonzero(weights)
        y = np.repeat([1, 0], len(x))
        other.fit(np.concatenate([x, x])[rows], y[rows], sample_weight=weights[rows])
        found.append(other.predict_proba(x)[:, 1])
    return np.stack(found, axis=1)


PROBLEMS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from([sample_images, several]),
        "num_classes": st.integers(2, 4),
        "strength": st.sampled_from([1.0, 1e-1, 1e-2, 1e-4, 1e-6]),
        "class_weights": st.lists(st.sampled_from([0.3, 1.0, 5.0]), min_size=4, max_size=4),
        "smoothing": st.sampled_from([0.0, 0.1, 0.4]),
        "has_weights": st.booleans(),
        "seed": st.integers(0, 99),
        "unit": st.sampled_from([1.0, 1000.0]),
    }
)


@given(problem=PROBLEMS)
def test_the_head_is_that_of_scikit_learn(problem):
    num_classes, strength, smoothing = (
        problem[n] for n in ("num_classes", "strength", "smoothing")
    )
    features, labels = problem["kind"](150, 12, num_classes, problem["seed"])
    weights = np.random.default_rng(problem["seed"]).uniform(0.1, 3, 150)
    weights = weights if problem["has_weights"] else np.ones(150)
    class_weights = np.array(problem["class_weights"][:num_classes])
    settings = (num_classes, strength, class_weights, smoothing, weights)
    probe = fit_probe(
        problem["unit"] * features + 7,  # the unit and the origin have no part in the result
        labels,
        num_classes,
        [strength],
        class_weights,
        smoothing,
        weights if problem["has_weights"] else None,
    )
    found = logits(probe, problem["unit"] * features + 7)
    ours = softmax(found, axis=1) if labels.ndim == 1 else expit(found)
    np.testing.assert_allclose(ours, by_sklearn(features, labels, *settings), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [sample_images, several])
def test_control_the_comparison_sees_each_setting(kind):
    features, labels = kind(150, 12, 3)
    weights = np.random.default_rng(0).uniform(0.1, 3, 150)
    right = {
        "strength": 1e-2,
        "class_weights": [1.0, 2.0, 3.0],
        "smoothing": 0.1,
        "image_weights": weights,
    }
    expected = by_sklearn(features, labels, 3, **right)
    for wrong in (
        {"strength": 2e-2},
        {"class_weights": np.ones(3)},
        {"smoothing": 0.15},
        {"image_weights": np.ones(150)},
    ):
        assert abs(by_sklearn(features, labels, 3, **right | wrong) - expected).max() > 1e-4


def test_more_features_than_images():
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(20, 200)), np.arange(20) % 4
    probe = fit_probe(features, labels, 4, strengths=[1e-6])
    assert (logits(probe, features).argmax(axis=1) == labels).all()
    residual = softmax(logits(probe, features), axis=1) - np.eye(4)[labels]
    # the gradient of the documented loss, in the features as given
    by_weight = residual.T @ features / 20 + 1e-6 * scaled(features)[1] ** 2 * probe.weight
    assert np.linalg.norm(by_weight) + np.linalg.norm(residual.mean(axis=0)) < 1e-10


def test_the_weakest_penalty_is_solved_to_the_limit_of_rounding():
    """Steps from a gradient of 1e-16 lead away from the optimum: a fit that does not end there may never end."""
    labels = np.repeat([0, 1, 2], [14, 8, 3])
    rng = np.random.default_rng(3)
    features = rng.normal(size=(3, 5))[labels] + 1e-4 * rng.normal(size=(25, 5))
    features = (5 + features * np.logspace(0, -2, 5)).astype(np.float32).astype(np.float64)
    weights = 25 / (3 * np.bincount(labels))
    # images in another order round differently; a gradient of 1e-13 is 1e-7 from the optimum
    first, again = (
        fit_probe(features[order], labels[order], 3, [1e-6], weights, 0.01, groups=labels[order])
        for order in (np.arange(25), rng.permutation(25))
    )
    limit = 1e-7 * np.abs(first.weight).max()
    np.testing.assert_allclose(again.weight, first.weight, rtol=0, atol=limit)


# Cross-validation


@pytest.mark.parametrize("kind", [sample_images, several])
def test_the_strength_is_that_of_the_lowest_loss_of_heads_fitted_without_the_fold(kind):
    features, labels = kind(120, 12, 3)
    weights = np.random.default_rng(2).uniform(0.1, 3, 120)
    options = {"class_weights": np.array([3.0, 1.0, 0.5]), "label_smoothing": 0.05}
    probe = fit_probe(features, labels, 3, **options, image_weights=weights)
    table = probe.validation.table
    tried = [row[0] for row in table]
    # three more, all worse
    assert tried == sorted(STRENGTHS, reverse=True)[: tried.index(probe.strength) + 4]
    best = min(table, key=lambda row: row[1])
    assert best == table[probe.validation.best] and best[0] == probe.strength
    is_single = labels.ndim == 1
    strata = labels if is_single else MultiHot(labels.astype(np.uint8)).strata()
    folds = deal_folds(strata, np.arange(120))
    for strength, loss, score in {table[0], table[-4]}:
        held_out = np.empty((120, 3))
        for fold in range(5):
            rest = folds != fold
            single = fit_probe(
                features[rest], labels[rest], 3, [strength], **options, image_weights=weights[rest]
            )
            held_out[~rest] = logits(single, features[~rest])
        if strength == probe.strength:
            np.testing.assert_allclose(probe.validation.out_of_fold, held_out, rtol=0, atol=1e-4)
        class_weights = torch.tensor(options["class_weights"])
        outputs, images = torch.tensor(held_out), torch.tensor(weights)
        if is_single:
            assert score == (held_out.argmax(axis=1) == labels).mean()
            cross_entropy = torch.nn.CrossEntropyLoss(
                class_weights, reduction="none", label_smoothing=0.05
            )
            losses = cross_entropy(outputs, torch.tensor(labels))
            expected = (losses * images).sum() / (images * class_weights[labels]).sum()
        else:
            assert score == pytest.approx(
                average_precision_score(labels, held_out, average="macro")
            )
            wanted = torch.tensor(labels, dtype=torch.float64) * 0.95 + 0.025
            losses = torch.nn.functional.binary_cross_entropy_with_logits(
                outputs, wanted, pos_weight=class_weights, reduction="none"
            )
            expected = (losses.mean(dim=1) * images).sum() / images.sum()
        assert loss == pytest.approx(float(expected), abs=1e-5)
    # each was held out once
    assert abs(probe.validation.out_of_fold - logits(probe, features)).max() > 0.1


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5), per_group=st.integers(1, 4))
def test_folds_hold_each_class_evenly_and_keep_groups(sizes, per_group):
    labels = np.repeat(np.arange(len(sizes)), np.array(sizes) * per_group)
    groups = np.arange(len(labels)) // per_group
    folds = deal_folds(labels, groups)
    assert all(len(set(folds[groups == group])) == 1 for group in set(groups))
    counts = np.array([np.bincount(folds[labels == k], minlength=5) for k in range(len(sizes))])
    assert (counts.max(axis=1) - counts.min(axis=1) <= per_group).all()
    assert len(labels) < 40 or (folds[:5] != np.arange(5)).any()  # in no order


def test_of_equal_losses_the_strongest():
    features, labels = np.ones((40, 3)), np.arange(40) % 2
    probe = fit_probe(features, labels, 2, strengths=[0.01, 1.0, 0.1])
    assert probe.strength == 1.0
    assert (probe.weight == 0).all() and probe.score == 0.5
    assert probe.validation.table[0][1] == pytest.approx(np.log(2))


# Few images, and weights of 0


def test_too_few_images_are_not_cross_validated():
    features, labels = sample_images(100, 10, 3)
    more = fit_probe(
        np.vstack([features, features.max(axis=0) + 1]), np.append(labels, 3), 4, [0.1, 0.01]
    )
    assert (more.weight[3] != 0).any() and np.isfinite(more.validation.table).all()
    for rows in ([0], [0, 1, 2]):
        probe = fit_probe(features[rows], np.arange(len(rows)), 3)
        assert (
            probe.score is None
            and probe.validation.table == []
            and probe.strength == pytest.approx(1e-3)
        )
        assert (logits(probe, features[rows]).argmax(axis=1) == np.arange(len(rows))).all()
    # a second image of one class can be held out
    assert fit_probe(features[:4], np.array([0, 1, 2, 0]), 3).score is not None
    one = fit_probe(features, np.ones(100, int), 2, [0.1, 0.01])
    assert (logits(one, features).argmax(axis=1) == 1).all()


def test_classes_and_labels_without_images_and_labels_of_all_get_a_row():
    features, labels = sample_images(100, 10, 3)
    names = np.array([1, 2, 4])  # of 6
    probe = fit_probe(features, names[labels], 6, [0.1])
    alone = fit_probe(features, labels, 3, [0.1])
    np.testing.assert_allclose(probe.weight[names], alone.weight, atol=1e-9)
    assert (probe.weight[[0, 3, 5]] == 0).all()
    at_centre = softmax(probe.weight @ features.mean(axis=0) + probe.bias)
    np.testing.assert_allclose(at_centre[[0, 3, 5]], at_centre[names].sum() / 100)
    features, labels = several(100, 10, 3)
    labels[:, 0], labels[:, 2] = 0, 1
    for weights in (None, np.random.default_rng(2).uniform(0.1, 3, 100)):
        probe = fit_probe(features, labels, 3, [0.1, 0.01], image_weights=weights)
        assert (probe.weight[[0, 2]] == 0).all() and (probe.weight[1] != 0).any()
        assert probe.bias[[0, 2]] == pytest.approx([-np.log(100), np.log(100)])
    constant = fit_probe(features, np.zeros((100, 3)), 3)
    assert (constant.weight == 0).all() and np.isfinite(constant.bias).all()


def test_images_and_classes_of_weight_0_are_as_if_they_were_not_there():
    features, labels = sample_images(100, 10, 3)
    weights = np.random.default_rng(2).uniform(0.1, 3, 100)
    few = np.where(np.arange(100) < 4, weights, 0)
    ours = fit_probe(features, labels, 3, image_weights=few)
    alone = fit_probe(features[:4], labels[:4], 3, image_weights=weights[:4])
    np.testing.assert_array_equal(ours.weight, alone.weight)
    of_classes = np.array([0.0, 1.0, 2.0])
    is_used = labels > 0
    settings = {"strengths": [0.1, 0.01], "class_weights": of_classes}
    ours = fit_probe(features, labels, 3, **settings)
    alone = fit_probe(features[is_used], labels[is_used], 3, **settings)
    np.testing.assert_array_equal(ours.weight, alone.weight)
    # one image with a weight: four of five folds have no other one
    single = np.where(np.arange(100) == 0, 1, 0)
    assert np.isfinite(fit_probe(features, single, 3, **settings).weight).all()
    # With smoothing the loss of the others is divided by its weight: without it, there is none to choose by.
    settings = {"class_weights": np.array([0.0, 1.0]), "label_smoothing": 0.1}
    probe = fit_probe(features, single, 2, **settings)
    assert probe.score is None and probe.strength == STRENGTHS[len(STRENGTHS) // 2]
    assert np.isfinite(log_softmax(logits(probe, features), axis=1)).all()
    single[1] = 1  # with a second such image, which is in another fold, there is a choice
    assert fit_probe(features, single, 2, **settings).score is not None
