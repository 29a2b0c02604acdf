"""Familiarity: the cosine of an image with the nearest class mean, ranked among those of validation images."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from promise import control, promise

from finetune.features.familiarity import (
    MOST_IMAGES,
    Familiarity,
    class_means,
    some_of_each_class,
)

PLACES = np.array([[3.0, 1.0] + 30 * [0.0], [1.0, 3.0] + 30 * [0.0]])  # of two classes


def drawn(rng: np.random.Generator, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Features (num, 32) of images of two classes, and the classes."""
    labels = rng.integers(0, 2, num)
    return PLACES[labels] + rng.normal(size=(num, 32)), labels


def fitted(x: np.ndarray, labels: np.ndarray, held_out: np.ndarray) -> Familiarity:
    means = class_means(torch.from_numpy(x), torch.from_numpy(labels), 2)
    return Familiarity.fit(means, torch.from_numpy(held_out))


@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 1e3))
def test_familiarity_is_the_share_of_validation_images_that_are_no_nearer_to_a_class(seed, scale):
    rng = np.random.default_rng(seed)
    (x, labels), (held_out, _), (new, _) = (drawn(rng, num) for num in (20, 9, 7))
    found = fitted(x, labels, held_out).of(torch.from_numpy(scale * new)).numpy()

    def cosine(one: np.ndarray) -> float:
        means = [np.mean([v / np.linalg.norm(v) for v in x[labels == k]], 0) for k in set(labels)]
        return max(mean @ one / np.linalg.norm(mean) / np.linalg.norm(one) for mean in means)

    of_held_out = np.array([cosine(one) for one in held_out])
    shares = [(1 + (of_held_out <= cosine(one)).sum()) / 10 for one in new]
    np.testing.assert_allclose(found, shares)


@promise("familiarity")
@control("familiarity")
def test_at_most_the_share_of_new_images_of_the_classes_is_unfamiliar():
    rng = np.random.default_rng(0)
    shares = {"validation": [], "training": []}
    for _ in range(1000):
        (x, labels), (held_out, _), (new, _) = (drawn(rng, num) for num in (30, 39, 10))
        for name, ranked in (("validation", held_out), ("training", x)):
            familiar = fitted(x, labels, ranked).of(torch.from_numpy(new))
            shares[name].append(float((familiar < 0.1).double().mean()))
    # four standard errors of a mean of 1,000
    assert 0.05 < np.mean(shares["validation"]) < 0.1 + 4 * np.std(shares["validation"]) / 1000**0.5
    assert np.mean(shares["training"]) > 0.2  # the control: ranked among the images of the means


@given(st.lists(st.integers(0, 4), max_size=300), st.sampled_from([5, 200]))
def test_each_class_has_images_whose_features_are_averaged(labels, num_classes):
    labels = np.array(labels * 9, int)
    chosen = some_of_each_class(labels, num_classes)
    most = max(10, MOST_IMAGES // num_classes)
    counts = np.bincount(labels, minlength=5)
    assert len(set(chosen)) == len(chosen)
    assert np.bincount(labels[chosen], minlength=5).tolist() == np.minimum(counts, most).tolist()
