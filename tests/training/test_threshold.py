"""Thresholds, compared with trying all of them."""

import itertools

import numpy as np
import pytest

from finetune.system.messages import WrongUsage
from finetune.training.threshold import Aim, Choice, choose, parse_aim

NAMES = ["hotdog", "not-hotdog"]


def measured(p: np.ndarray, is_positive: np.ndarray, threshold: float) -> dict[str, float]:
    """The four metrics, by counting images one by one."""
    counts = {(predicted, true): 0 for predicted in (False, True) for true in (False, True)}
    for probability, true in zip(p, is_positive, strict=True):
        counts[bool(probability >= threshold), bool(true)] += 1
    right = counts[True, True]
    predicted = counts[True, True] + counts[True, False]
    true = int(is_positive.sum())
    return {
        "accuracy": (right + counts[False, False]) / len(p),
        "precision": right / predicted if predicted else 0.0,
        "recall": right / true,
        "f1": 2 * right / (predicted + true),
    }


def all_thresholds(p: np.ndarray) -> np.ndarray:
    """One in each gap between neighbouring probabilities, and below and above all."""
    known = np.unique([0.0, *p, 1.0])
    return np.unique([0.0, *(known[:-1] + known[1:]) / 2, 1.0])


def images(seed: int, num: int, has_ties: bool) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    is_positive = rng.permutation(np.arange(num) % 3 == 0)
    p = 1 / (1 + np.exp(-rng.normal(np.where(is_positive, 1.0, -1.0), 1.5)))
    return (p.round(1) if has_ties else p), is_positive


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize(
    "aim",
    [
        ("accuracy", None),
        ("f1", None),
        ("precision", 0.8),
        ("precision", 1.0),
        ("recall", 0.7),
        ("recall", 1.0),
    ],
)
def test_the_best_of_all_thresholds_is_found(aim, has_ties):
    measure, least = aim
    other = {"precision": "recall", "recall": "precision"}.get(measure, measure)
    for seed, num in itertools.product(range(6), (2, 3, 10, 60)):
        p, is_positive = images(seed, num, has_ties)
        tried = [measured(p, is_positive, t) for t in all_thresholds(p)]
        met = [m for m in tried if least is None or m[measure] >= least]
        choice = choose(Aim(measure, least, 0), p, is_positive)
        if not met:
            assert choice == Choice(None, max(m[measure] for m in tried))
            continue
        assert choice.value is not None and 0 <= choice.value <= 1
        found = measured(p, is_positive, choice.value)
        assert found[measure] == choice.reached and (least is None or choice.reached >= least)
        assert found[other] == max(m[other] for m in met)


def test_control_a_half_is_often_not_the_best():
    differs = 0
    for seed in range(20):
        p, is_positive = images(seed, 60, has_ties=False)
        differs += (
            measured(p, is_positive, 0.5)["f1"] < choose(Aim("f1", None, 0), p, is_positive).reached
        )
    assert differs > 10


def test_it_lies_half_way_and_of_equals_near_a_half():
    p, is_positive = np.array([0.9, 0.2, 0.7, 0.4]), np.array([True, False, True, False])
    assert choose(Aim("accuracy", None, 0), p, is_positive) == Choice(pytest.approx(0.55), 1.0)
    # 0.8 and 0.3 make one mistake each.
    assert choose(
        Aim("accuracy", None, 0), p, np.array([True, False, False, True])
    ).value == pytest.approx(0.3)


def test_the_order_of_the_images_does_not_matter():
    p, is_positive = images(0, 60, has_ties=True)
    shuffled = np.random.default_rng(1).permutation(60)
    for aim in (Aim("f1", None, 0), Aim("recall", 0.9, 0)):
        assert choose(aim, p, is_positive) == choose(aim, p[shuffled], is_positive[shuffled])


def test_neighbouring_floats_and_ends_are_distinguished():
    for low in (0.5, 1.0 - 2.0**-53, 0.0, 5e-324):
        high = float(np.nextafter(low, 2.0))
        choice = choose(Aim("accuracy", None, 0), np.array([low, high]), np.array([False, True]))
        assert choice == Choice(high, 1.0)
    everything = choose(
        Aim("accuracy", None, 0), np.array([1.0, 1.0, 1.0]), np.array([True, True, False])
    )
    assert (
        everything.value is not None
        and everything.value <= 1.0
        and everything.reached == pytest.approx(2 / 3)
    )
    nothing = choose(
        Aim("accuracy", None, 0), np.array([0.9, 0.9, 0.8]), np.array([False, False, True])
    )
    assert nothing == Choice(pytest.approx(0.95), pytest.approx(2 / 3))


@pytest.mark.parametrize("is_positive", [True, False])
def test_images_of_one_class_have_no_threshold(is_positive):
    p = np.array([0.1, 0.9])
    assert choose(Aim("accuracy", None, 0), p, np.array([is_positive] * 2)) == Choice(None, None)


def test_aims_as_they_are_written():
    assert parse_aim("accuracy", NAMES) == ("accuracy", None, 0)
    assert parse_aim("f1", NAMES) == ("f1", None, 0)
    assert parse_aim("f1:not-hotdog", NAMES) == ("f1", None, 1)
    assert parse_aim("precision:0.95", NAMES) == ("precision", 0.95, 0)
    assert parse_aim("recall:.99:hotdog", NAMES) == ("recall", 0.99, 0)
    assert parse_aim("recall:1:not-hotdog", NAMES) == ("recall", 1.0, 1)
    assert parse_aim("recall:0.9:a:b", ["a", "a:b"]) == ("recall", 0.9, 1)  # a colon in a name


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "f2",
            "F1",
            "precision",
            "precision:",
            "precision:1.5",
            "precision:0",
            "recall:-1",
            "recall:nan",
        ),
        *("recall:99%", "recall::hotdog", "recall:inf", "0.5", ":"),
    ],
)
def test_what_is_no_aim_is_wrong_usage(text):
    with pytest.raises(WrongUsage, match="accuracy, f1, precision:P or recall:P"):
        parse_aim(text, NAMES)


@pytest.mark.parametrize("typed", ["café", "cafe\u0301"])
@pytest.mark.parametrize("name", ["café", "cafe\u0301"])
def test_a_class_is_found_in_either_unicode_composition(typed, name):
    assert parse_aim(f"f1:{typed}", ["bar", name]).positive == 1


def test_classes_that_are_not_there_or_not_two():
    with pytest.raises(ValueError, match="no class 'hotdgo'; there are hotdog and not-hotdog"):
        parse_aim("f1:hotdgo", NAMES)
    with pytest.raises(ValueError, match="two classes, these are 3"):
        parse_aim("f1", ["a", "b", "c"])
