"""Logistic regression on fixed features."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import expit, log_softmax, softmax
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score

from finetune.data.targets import MultiHot
from finetune.features.logistic_regression import (
    STRENGTHS,
    Probe,
    _CrossEntropy,
    _Images,
    _solve,
    deal_folds,
    fit_probe,
)


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


def scale(features: np.ndarray) -> float:
    return np.sqrt(((features - features.mean(axis=0)) ** 2).sum(axis=1).mean())


def gradient(probe: Probe, features: np.ndarray, labels: np.ndarray) -> float:
    """Norm of the documented loss's gradient, worked out in the features as given."""
    residual = (
        softmax(features @ probe.weight.T + probe.bias, axis=1) - np.eye(len(probe.bias))[labels]
    )
    # strength / 2 * |w|^2 counts weights of features divided by the scale: w = weight * scale.
    by_weight = (
        residual.T @ features / len(features) + probe.strength * scale(features) ** 2 * probe.weight
    )
    return float(np.hypot(np.linalg.norm(by_weight), np.linalg.norm(residual.mean(axis=0))))


def accuracy(probe: Probe, features: np.ndarray, labels: np.ndarray) -> float:
    return float(((features @ probe.weight.T + probe.bias).argmax(axis=1) == labels).mean())


@pytest.mark.parametrize("num_classes", [2, 4])
@pytest.mark.parametrize("strength", [1.0, 1e-2, 1e-4, 1e-6])
def test_solved_to_convergence_and_equal_to_an_independent_solver(num_classes, strength):
    features, labels = sample_images(300, 20, num_classes)
    probe = fit_probe(features, labels, num_classes, strengths=[strength])
    assert gradient(probe, features, labels) < 1e-10
    scaled = (features - features.mean(axis=0)) / scale(features)
    # scikit-learn sums the losses: C = 1 / (N strength). For two classes it has one row, 2 w, where ours are +w and -w:
    # the penalty of the two is half of that of the one.
    c = 1 / (300 * strength) * (2 if num_classes == 2 else 1)
    other = LogisticRegression(C=c, tol=1e-12, max_iter=1000, solver="newton-cholesky").fit(
        scaled, labels
    )
    ours = softmax(features @ probe.weight.T + probe.bias, axis=1)
    np.testing.assert_allclose(ours, other.predict_proba(scaled), atol=1e-7)
    wrong = LogisticRegression(C=2 * c, tol=1e-12, max_iter=1000, solver="newton-cholesky").fit(
        scaled, labels
    )
    # the comparison sees a strength that is off
    assert abs(ours - wrong.predict_proba(scaled)).max() > 1e-3


@pytest.mark.parametrize("num_classes", [2, 4])
@pytest.mark.parametrize("strength", [1e-1, 1e-3])
def test_class_weights_are_those_of_an_independent_solver(num_classes, strength):
    features, labels = sample_images(400, 20, num_classes)
    kept = (labels != 0) | (np.arange(400) % 6 == 0)  # a rare class
    features, labels = features[kept], labels[kept]
    balanced = len(labels) / (num_classes * np.bincount(labels))
    assert balanced[0] > 2 * balanced[1]
    probe = fit_probe(features, labels, num_classes, strengths=[strength], class_weights=balanced)
    scaled = (features - features.mean(axis=0)) / scale(features)
    # as above; the weights' sum is that of images
    c = 1 / (len(labels) * strength) * (2 if num_classes == 2 else 1)
    solver = {"C": c, "tol": 1e-12, "max_iter": 1000, "solver": "newton-cholesky"}
    other = LogisticRegression(class_weight="balanced", **solver).fit(scaled, labels)
    ours = softmax(features @ probe.weight.T + probe.bias, axis=1)
    np.testing.assert_allclose(ours, other.predict_proba(scaled), rtol=0, atol=1e-7)
    # The control: without weights the rare class gets less.
    unweighted = LogisticRegression(**solver).fit(scaled, labels).predict_proba(scaled)
    assert ours[:, 0].mean() > unweighted[:, 0].mean() + 0.03
    # Only their ratios count.
    again = fit_probe(
        features, labels, num_classes, strengths=[strength], class_weights=7 * balanced
    )
    np.testing.assert_allclose(
        again.weight, probe.weight, rtol=0, atol=1e-9 * abs(probe.weight).max()
    )


def test_minimum_of_the_documented_loss():
    features, labels = sample_images(60, 5, 3)
    x = np.column_stack([(features - features.mean(axis=0)) / scale(features), np.ones(60)])

    def loss(flat: np.ndarray) -> float:
        w = flat.reshape(3, 6)
        return (
            -log_softmax(x @ w.T, axis=1)[np.arange(60), labels].mean()
            + 0.01 / 2 * (w[:, :-1] ** 2).sum()
        )

    best = minimize(
        loss, np.random.default_rng(3).normal(size=18), method="L-BFGS-B", options={"ftol": 1e-15}
    )
    probe = fit_probe(features, labels, 3, strengths=[0.01])
    # Differences for a gradient: L-BFGS gets no nearer than about 1e-4.
    np.testing.assert_allclose(
        probe.weight * scale(features), best.x.reshape(3, 6)[:, :-1], atol=1e-3
    )


def test_the_start_has_no_part_in_the_result():
    features, labels = sample_images(200, 20, 3)
    images = _Images.scaled(features, labels)
    problem = _CrossEntropy(np.ones(3), 0.0).problem(images, np.ones((2, 200), bool))
    # two fits together: from zero, and from afar
    starts = np.zeros((2, 3, 21))
    starts[1] = 10 * np.random.default_rng(0).normal(size=(3, 21))
    strengths = torch.full((2,), 1e-3, dtype=torch.float64)
    from_zero, afar = _solve(images, problem, strengths, torch.tensor(starts), 1e-12).numpy()
    np.testing.assert_allclose(from_zero[:, :-1], afar[:, :-1], atol=1e-9)
    # the biases are known up to one number, which fit_probe fixes
    shift = afar[:, -1] - from_zero[:, -1]
    np.testing.assert_allclose(shift, shift[0], atol=1e-9)


@pytest.mark.parametrize("seed", [0, 3])
def test_the_weakest_penalty_is_solved_to_the_limit_of_rounding_in_a_few_steps(seed, monkeypatch):
    """Steps from a gradient of 1e-16 lead away from the optimum: a fit that does not end there may never end."""
    monkeypatch.setattr("finetune.features.logistic_regression._MAX_STEPS", 30)
    labels = np.repeat([0, 1, 2], [14, 8, 3])
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(3, 5))[labels] + 1e-4 * rng.normal(size=(25, 5))
    features = (5 + features * np.logspace(0, -2, 5)).astype(np.float32).astype(np.float64)
    settings = {
        "strengths": [1e-6],
        "class_weights": 25 / (3 * np.bincount(labels)),
        "label_smoothing": 0.01,
        "groups": labels,  # no cross-validation
    }
    probe = fit_probe(features, labels, 3, **settings)
    # images in another order round differently; a gradient of 1e-13 is 1e-7 from the optimum
    order = rng.permutation(25)
    again = fit_probe(features[order], labels[order], 3, **{**settings, "groups": labels[order]})
    np.testing.assert_allclose(
        again.weight, probe.weight, rtol=0, atol=1e-7 * np.abs(probe.weight).max()
    )


@pytest.mark.parametrize("kind", ["classes", "labels"])
def test_fits_that_do_not_fit_into_memory_together_have_the_same_result(kind, monkeypatch):
    features, labels = sample_images(60, 8, 3)
    if kind == "labels":
        labels = np.eye(3, dtype=np.float32)[labels]
    settings = {"strengths": [1e-1, 1e-3], "image_weights": np.linspace(0.5, 2, 60)}
    together = fit_probe(features, labels, 3, **settings)
    monkeypatch.setattr("finetune.features.logistic_regression._MAX_ELEMENTS", 1)
    one_by_one = fit_probe(features, labels, 3, **settings)
    np.testing.assert_allclose(one_by_one.weight, together.weight, rtol=0, atol=1e-8)
    # fits of folds stop at a gradient of 1e-8: the weights are within 1e-5 of the optimum at the weaker strength
    np.testing.assert_allclose(one_by_one.out_of_fold, together.out_of_fold, rtol=0, atol=1e-4)
    assert abs(together.out_of_fold - together.out_of_fold.mean(axis=0)).max() > 0.1


def test_more_features_than_images_separable():
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(20, 200)), np.arange(20) % 4
    probe = fit_probe(features, labels, 4, strengths=[1e-6])
    assert accuracy(probe, features, labels) == 1.0
    assert gradient(probe, features, labels) < 1e-10


@pytest.mark.parametrize("class_weights", [None, np.array([2.0, 0.5, 1.0])])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_gradient_of_torch_s_cross_entropy_vanishes(class_weights, label_smoothing):
    """Torch's own loss is an independent statement of what class weights and label smoothing mean."""
    features, labels = sample_images(200, 12, 3)
    options = {"class_weights": class_weights, "label_smoothing": label_smoothing}
    probe = fit_probe(features, labels, 3, strengths=[1e-2], **options)

    def norm(smoothing: float, weights: np.ndarray | None) -> float:
        weight = torch.tensor(probe.weight * scale(features), requires_grad=True)
        bias = torch.tensor(probe.bias + probe.weight @ features.mean(axis=0), requires_grad=True)
        x = torch.tensor((features - features.mean(axis=0)) / scale(features))
        loss = torch.nn.functional.cross_entropy(
            x @ weight.T + bias,
            torch.tensor(labels),
            weight=None if weights is None else torch.tensor(weights),
            label_smoothing=smoothing,
        )
        (loss + 1e-2 / 2 * (weight**2).sum()).backward()
        return float(weight.grad.norm() + bias.grad.norm())

    assert norm(label_smoothing, class_weights) < 1e-10
    # the control: another smoothing, other weights
    assert norm(label_smoothing + 0.05, class_weights) > 1e-3
    assert norm(label_smoothing, np.array([1.0, 1.0, 3.0])) > 1e-3


def test_strength_and_answers_out_of_fold_are_those_of_heads_fitted_without_the_fold():
    features, labels = sample_images(100, 12, 3)
    weights = np.array([3.0, 1.0, 0.5])
    probe = fit_probe(features, labels, 3, class_weights=weights, label_smoothing=0.05)
    tried = [row[0] for row in probe.table]
    # three more, all worse
    assert tried == sorted(STRENGTHS, reverse=True)[: tried.index(probe.strength) + 4]
    assert STRENGTHS[-1] < probe.strength < STRENGTHS[0]  # inside the grid, so both ends were worse
    folds = deal_folds(labels, np.arange(100))
    # three worse ones follow the best
    for strength, loss, share in (probe.table[0], probe.table[-4]):
        logits = np.empty((100, 3))
        for fold in range(5):
            rest = folds != fold
            single = fit_probe(
                features[rest],
                labels[rest],
                3,
                [strength],
                class_weights=weights,
                label_smoothing=0.05,
            )
            logits[~rest] = features[~rest] @ single.weight.T + single.bias
        expected = torch.nn.functional.cross_entropy(
            torch.tensor(logits),
            torch.tensor(labels),
            weight=torch.tensor(weights),
            label_smoothing=0.05,
        )
        assert loss == pytest.approx(float(expected), abs=1e-6)
        assert share == (logits.argmax(axis=1) == labels).mean()
        if strength == probe.strength:
            np.testing.assert_allclose(probe.out_of_fold, logits, rtol=0, atol=1e-4)
    best = min(probe.table, key=lambda row: row[1])
    assert (probe.strength, probe.loss, probe.score) == best
    # each was held out once
    assert abs(probe.out_of_fold - (features @ probe.weight.T + probe.bias)).max() > 0.1


def test_folds_have_as_many_of_each_class():
    labels = np.repeat([0, 1, 2], [100, 33, 7])
    folds = deal_folds(labels, np.arange(140))
    counts = np.array([np.bincount(folds[labels == label], minlength=5) for label in range(3)])
    assert (counts.max(axis=1) - counts.min(axis=1) <= 1).all()
    assert (folds[:5] != np.arange(5)).any()  # in no order


@pytest.mark.slow
def test_cross_validation_finds_about_the_strength_that_fresh_images_want():
    features, labels = sample_images(200, 60, 3)
    fresh, fresh_labels = sample_images(2000, 60, 3, seed=1)
    losses = {}
    for strength in STRENGTHS:
        single = fit_probe(features, labels, 3, strengths=[strength])
        logits = fresh @ single.weight.T + single.bias
        losses[strength] = -log_softmax(logits, axis=1)[np.arange(2000), fresh_labels].mean()
    probe = fit_probe(features, labels, 3)
    best = min(losses, key=losses.__getitem__)
    assert abs(np.log10(probe.strength / best)) <= 0.51  # at most a neighbour on the grid
    # of 200: 0.03 a deviation
    assert probe.score == pytest.approx(accuracy(probe, fresh, fresh_labels), abs=0.1)
    assert gradient(probe, features, labels) < 1e-10  # fitted on all images at the end


@pytest.mark.slow
def test_units_and_origin_of_the_features_have_no_part_in_the_result():
    features, labels = sample_images(200, 10, 3)
    probe = fit_probe(features, labels, 3)
    other = fit_probe(1000 * features + 7, labels, 3)
    logits = features @ probe.weight.T + probe.bias
    np.testing.assert_allclose(
        (1000 * features + 7) @ other.weight.T + other.bias, logits, atol=1e-6
    )


def test_of_equal_losses_the_strongest():
    features, labels = np.ones((40, 3)), np.arange(40) % 2
    probe = fit_probe(features, labels, 2, strengths=[0.01, 1.0, 0.1])
    assert probe.strength == 1.0
    assert (probe.weight == 0).all() and probe.score == 0.5
    assert probe.table[0][1] == pytest.approx(np.log(2))


@pytest.mark.slow
def test_rounding_has_no_part_in_a_head_even_of_the_weakest_strength():
    features, labels = sample_images(90, 20, 3, seed=3)
    features[:, 0] += 3 * labels  # separable: the weights grow until the weak strength holds them
    probe = fit_probe(features, labels, 3, strengths=[1e-6])
    for seed in range(3):
        rounded = features * (
            1 + 1e-16 * np.random.default_rng(seed).choice([-1, 1], features.shape)
        )
        again = fit_probe(rounded, labels, 3, strengths=[1e-6])
        np.testing.assert_allclose(
            again.weight * scale(features), probe.weight * scale(features), rtol=0, atol=1e-9
        )


def test_classes_with_one_image():
    features, labels = sample_images(100, 10, 3)
    features = np.vstack([features, features.max(axis=0) + 1])
    probe = fit_probe(features, np.append(labels, 3), 4)
    assert (probe.weight[3] != 0).any() and np.isfinite(probe.table).all()
    single = fit_probe(features[:1], np.array([1]), 3)
    assert single.score is None and single.table == []


def test_one_image_of_each_class_is_not_cross_validated():
    features, _ = sample_images(5, 10, 3)
    labels = np.arange(3)
    probe = fit_probe(features[:3], labels, 3)
    assert probe.score is None and probe.table == []
    assert probe.strength == pytest.approx(1e-3)
    assert accuracy(probe, features[:3], labels) == 1.0
    # a second image of one class can be held out
    labels = np.array([0, 1, 2, 0])
    assert fit_probe(features[:4], labels, 3).score is not None


@pytest.mark.slow
def test_classes_without_images_get_a_row():
    features, labels = sample_images(100, 10, 3)
    names = np.array([1, 2, 4])  # of 6
    probe = fit_probe(features, names[labels], 6)
    alone = fit_probe(features, labels, 3)
    np.testing.assert_allclose(probe.weight[names], alone.weight, atol=1e-9)
    assert (probe.weight[[0, 3, 5]] == 0).all()
    at_centre = softmax(probe.weight @ features.mean(axis=0) + probe.bias)
    np.testing.assert_allclose(at_centre[[0, 3, 5]], at_centre[names].sum() / 100)


def test_one_class_only():
    probe = fit_probe(np.random.default_rng(0).normal(size=(10, 3)), np.ones(10, int), 2)
    assert accuracy(probe, np.zeros((1, 3)), np.array([1])) == 1.0


@pytest.mark.parametrize(
    ("features", "strengths", "message"),
    [
        (np.array([[np.nan], [1.0]]), [1.0], "not finite"),
        (np.zeros((0, 3)), [1.0], "there are no features"),
        (np.zeros((2, 3)), [0.0], "strengths must be above 0, not 0.0"),
    ],
)
def test_errors(features, strengths, message):
    with pytest.raises(ValueError, match=message):
        fit_probe(features, np.zeros(len(features), int), 2, strengths=strengths)


def several(num: int, num_features: int, num_labels: int) -> tuple[np.ndarray, np.ndarray]:
    """Features as above, with several labels or none for each image; the last label is rare."""
    features, _ = sample_images(num, num_features, num_labels)
    rng = np.random.default_rng(1)
    directions = rng.normal(size=(num_labels, num_features)) / scale(features)
    logits = features @ directions.T
    logits += rng.logistic(size=logits.shape) - np.quantile(logits, 0.6, axis=0)
    logits[:, -1] -= 2.5
    return features, (logits > 0).astype(np.float32)


@pytest.mark.parametrize("strength", [1.0, 1e-2, 1e-4, 1e-6])
def test_each_of_several_labels_has_the_head_of_an_independent_solver(strength):
    features, labels = several(300, 20, 4)
    probe = fit_probe(features, labels, 4, strengths=[strength])
    scaled = (features - features.mean(axis=0)) / scale(features)
    solver = {"tol": 1e-12, "max_iter": 1000, "solver": "newton-cholesky"}
    ours = expit(features @ probe.weight.T + probe.bias)
    assert 3 < labels[:, -1].sum() < 60 and (labels.sum(axis=1) == 0).any()
    for k in range(4):
        other = LogisticRegression(C=1 / (300 * strength), **solver).fit(scaled, labels[:, k])
        np.testing.assert_allclose(ours[:, k], other.predict_proba(scaled)[:, 1], atol=1e-7)
    wrong = LogisticRegression(C=2 / (300 * strength), **solver).fit(scaled, labels[:, 0])
    assert abs(ours[:, 0] - wrong.predict_proba(scaled)[:, 1]).max() > 1e-4  # control


@pytest.mark.parametrize("kind", [sample_images, several])
@pytest.mark.parametrize("strength", [1e-1, 1e-4])
def test_a_weight_of_2_is_the_image_twice(kind, strength):
    features, labels = kind(120, 12, 3)
    weights = np.random.default_rng(2).integers(0, 4, 120)
    options = {
        "strengths": [strength],
        "class_weights": np.array([2.0, 0.5, 3.0]),
        "label_smoothing": 0.1,
    }
    probe = fit_probe(features, labels, 3, image_weights=weights / 7, **options)
    twice = fit_probe(
        features.repeat(weights, axis=0), labels.repeat(weights, axis=0), 3, **options
    )
    # each is within 1e-10 of the optimum, in features scaled by less than 10
    for name in ("weight", "bias"):
        ours, expected = getattr(probe, name), getattr(twice, name)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-8)
    plain = fit_probe(features, labels, 3, **options)  # the control
    assert abs(plain.weight - twice.weight).max() > 1e-3


def test_image_weights_are_those_of_an_independent_solver():
    features, labels = sample_images(300, 20, 4)
    weights = np.random.default_rng(2).uniform(0, 3, 300)
    probe = fit_probe(features, labels, 4, strengths=[1e-2], image_weights=weights)
    centre = np.average(features, axis=0, weights=weights)
    size = np.sqrt(np.average(((features - centre) ** 2).sum(axis=1), weights=weights))
    solver = LogisticRegression(
        C=1 / (weights.sum() * 1e-2), tol=1e-12, max_iter=1000, solver="newton-cholesky"
    )
    scaled = (features - centre) / size
    other = solver.fit(scaled, labels, sample_weight=weights).predict_proba(scaled)
    ours = softmax(features @ probe.weight.T + probe.bias, axis=1)
    np.testing.assert_allclose(ours, other, rtol=0, atol=1e-7)


def test_weights_are_in_the_loss_that_chooses_the_strength():
    features, labels = sample_images(200, 30, 3)
    weights = np.random.default_rng(2).uniform(0.1, 3, 200)
    probe = fit_probe(features, labels, 3, image_weights=weights)
    losses = -log_softmax(probe.out_of_fold, axis=1)[np.arange(200), labels]
    assert probe.loss == pytest.approx(np.average(losses, weights=weights), rel=1e-9)
    assert probe.score == np.mean(probe.out_of_fold.argmax(axis=1) == labels)
    # images of weight 0 are as if they were not there, also where they are nearly all
    few = np.where(np.arange(200) < 4, weights, 0)
    ours, alone = (
        fit_probe(features, labels, 3, image_weights=few),
        fit_probe(features[:4], labels[:4], 3, image_weights=weights[:4]),
    )
    np.testing.assert_array_equal(ours.weight, alone.weight)
    with pytest.raises(ValueError, match="there are no features"):
        fit_probe(features, labels, 3, image_weights=np.zeros(200))


def test_a_class_of_weight_0_is_as_if_its_images_were_not_there():
    features, labels = sample_images(60, 10, 3)
    weights = np.array([0.0, 1.0, 2.0])
    is_used = labels > 0
    ours = fit_probe(features, labels, 3, class_weights=weights)
    alone = fit_probe(features[is_used], labels[is_used], 3, class_weights=weights)
    np.testing.assert_array_equal(ours.weight, alone.weight)
    # one image with a weight: four of five folds have no other one
    single = np.where(np.arange(60) == 0, 1, 0)
    assert np.isfinite(fit_probe(features, single, 3, class_weights=weights).weight).all()


def test_smoothed_labels_of_a_class_of_weight_0_and_one_other_image():
    features, labels = sample_images(20, 5, 1)
    labels[7] = 1
    settings = {"class_weights": np.array([0.0, 1.0]), "label_smoothing": 0.1}
    probe = fit_probe(features, labels, 2, **settings)
    # The loss of the other images is divided by the weight of image 7: without it, there is none to choose by.
    assert probe.score is None and probe.strength == STRENGTHS[len(STRENGTHS) // 2]
    assert np.isfinite(probe.weight).all() and np.isfinite(probe.bias).all()
    logits = torch.tensor(features @ probe.weight.T + probe.bias)
    classes = torch.tensor([0.0, 1.0], dtype=torch.float64)
    loss = torch.nn.functional.cross_entropy(
        logits, torch.tensor(labels), classes, label_smoothing=0.1
    )
    assert loss.isfinite()
    # with a second such image, which is in another fold, there is a choice
    labels[11] = 1
    assert fit_probe(features, labels, 2, **settings).score is not None
    with pytest.raises(ValueError, match="all images have classes of weight 0"):
        fit_probe(features, np.zeros(20, int), 2, **settings)


def test_weights_make_no_problem_of_a_label_that_every_image_has():
    features, labels = several(100, 10, 3)
    labels[:, 2] = 1
    weights = np.random.default_rng(2).uniform(0.1, 3, 100)
    probe = fit_probe(features, labels, 3, image_weights=weights)
    assert (probe.weight[2] == 0).all() and probe.bias[2] == pytest.approx(np.log(100))


@pytest.mark.parametrize("class_weights", [None, np.array([2.0, 0.5, 9.0])])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_gradient_of_torch_s_binary_cross_entropy_vanishes(class_weights, label_smoothing):
    features, labels = several(200, 12, 3)
    options = {"class_weights": class_weights, "label_smoothing": label_smoothing}
    probe = fit_probe(features, labels, 3, strengths=[1e-2], **options)

    def norm(smoothing: float, weights: np.ndarray | None) -> float:
        weight = torch.tensor(probe.weight * scale(features), requires_grad=True)
        bias = torch.tensor(probe.bias + probe.weight @ features.mean(axis=0), requires_grad=True)
        x = torch.tensor((features - features.mean(axis=0)) / scale(features))
        wanted = torch.tensor(labels, dtype=torch.float64) * (1 - smoothing) + smoothing / 2
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            x @ weight.T + bias,
            wanted,
            pos_weight=None if weights is None else torch.tensor(weights),
            reduction="sum",
        )
        (loss / 200 + 1e-2 / 2 * (weight**2).sum()).backward()
        return float(weight.grad.norm() + bias.grad.norm())

    assert norm(label_smoothing, class_weights) < 1e-9
    # the controls: another smoothing, other weights
    assert norm(label_smoothing + 0.05, class_weights) > 1e-3
    assert norm(label_smoothing, np.array([1.0, 1.0, 3.0])) > 1e-3


def test_the_strength_of_several_labels_is_the_one_with_the_lowest_held_out_loss():
    features, labels = several(120, 12, 3)
    probe = fit_probe(features, labels, 3)
    folds = deal_folds(MultiHot(labels.astype(np.uint8)).strata(), np.arange(120))
    strength, loss, score = min(probe.table, key=lambda row: row[1])
    assert (probe.strength, probe.loss, probe.score) == (strength, loss, score)
    logits = np.empty((120, 3))
    for fold in range(5):
        rest = folds != fold
        single = fit_probe(features[rest], labels[rest], 3, [strength])
        logits[~rest] = features[~rest] @ single.weight.T + single.bias
    np.testing.assert_allclose(probe.out_of_fold, logits, rtol=0, atol=1e-4)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.tensor(logits), torch.tensor(labels, dtype=torch.float64)
    )
    assert loss == pytest.approx(float(expected), abs=1e-6)
    assert score == pytest.approx(average_precision_score(labels, logits, average="macro"))


def test_labels_of_no_image_and_of_every_image_get_a_row():
    features, labels = several(100, 10, 3)
    labels[:, 0], labels[:, 2] = 0, 1
    probe = fit_probe(features, labels, 3)
    alone = fit_probe(features, labels[:, [1, 1]], 2, strengths=[probe.strength])
    np.testing.assert_allclose(probe.weight[1], alone.weight[0], atol=1e-8)
    assert (probe.weight[[0, 2]] == 0).all()
    assert probe.bias[[0, 2]] == pytest.approx([-np.log(100), np.log(100)])
    constant = fit_probe(features, np.zeros((100, 3)), 3)
    assert (constant.weight == 0).all() and np.isfinite(constant.bias).all()
