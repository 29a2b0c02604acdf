"""Successive halving finds the network whose features separate the classes best, within its time."""

import time

import numpy as np
import pytest

from finetune.features import backbone_ranking as module
from finetune.features.backbone_ranking import (
    Unusable,
    cross_validated_scores,
    first_round,
    rank,
    stratified_order,
)
from finetune.features.logistic_regression import fit_head

NUM = 600
CLASSES = 4
DIM = 24
LABELS = np.random.default_rng(0).integers(0, CLASSES, NUM)


def features(signal: float, labels: np.ndarray = LABELS, seed: int = 1) -> np.ndarray:
    """Features whose class means lie `signal` standard deviations from the centre."""
    rng = np.random.default_rng(seed)
    means = np.eye(CLASSES, DIM) * signal
    return means[labels] + rng.standard_normal((len(labels), DIM))


def networks(asked: dict[str, list[int]] | None = None, **table: np.ndarray):
    """Networks by name with these features of each image; `asked` gets how many images each is asked for."""

    def load(name: str):
        def of(chosen, deadline):
            if asked is not None:
                asked.setdefault(name, []).append(len(chosen))
            return table[name][chosen]

        return lambda: of

    return {name: load(name) for name in table}


def test_the_informative_network_wins_and_noise_is_at_chance():
    table = {"noise": features(0.0), "weak": features(1.0), "strong": features(3.0)}
    ranking = rank(networks(**table), LABELS, CLASSES, 1e9)
    assert [standing.name for standing in ranking.standings] == ["strong", "weak", "noise"]
    strong, weak, noise = ranking.standings
    assert strong.accuracy > 0.9 > weak.accuracy > 0.4
    # A quarter by chance; the standard error of 256 images is 0.027.
    assert noise.accuracy < 0.25 + 4 * 0.027
    # the control: no network predicts these
    shuffled = np.random.default_rng(3).permutation(LABELS)
    assert all(
        standing.accuracy < 0.36
        for standing in rank(networks(**table), shuffled, CLASSES, 1e9).standings
    )


def test_the_better_half_continues_with_twice_the_images_and_no_image_is_asked_for_twice(
    monkeypatch,
):
    monkeypatch.setattr(module, "FEWEST_IMAGES", 64)
    asked: dict[str, list[int]] = {}
    table = {f"n{i}": features(float(i), seed=i) for i in range(4)}
    ranking = rank(networks(asked, **table), LABELS, CLASSES, 1e9)
    assert asked == {"n0": [300], "n1": [300], "n2": [300, 300], "n3": [300, 300]}
    assert [(s.name, s.num_images) for s in ranking.standings] == [
        ("n3", 600),
        ("n2", 600),
        ("n1", 300),
        ("n0", 300),
    ]
    assert not ranking.is_cut and not ranking.untried


def test_few_images_are_all_used_at_once():
    asked: dict[str, list[int]] = {}
    few = LABELS[:200]
    rank(
        networks(asked, a=features(1, few), b=features(2, few), c=features(3, few)),
        few,
        CLASSES,
        1e9,
    )
    assert asked == {"a": [200], "b": [200], "c": [200]}


def test_of_many_images_no_more_than_the_limit_are_used():
    labels = np.arange(5000) % CLASSES
    ranking = rank(networks(a=features(1, labels), b=features(2, labels)), labels, CLASSES, 1e9)
    assert ranking.standings[0].num_images == ranking.num_images == module.MOST_IMAGES
    assert first_round(module.MOST_IMAGES, CLASSES, 8) == 256
    assert first_round(1_000, 1_000, 8) == 1_000  # all are needed


def test_each_beginning_of_the_order_has_the_same_shares_and_the_seed_decides_it():
    labels = np.array([0] * 300 + [1] * 100)
    order = stratified_order(labels, 0)
    assert sorted(order) == list(range(400))
    for num in (40, 100, 200):
        assert abs((labels[order[:num]] == 1).sum() - num / 4) <= 1
    assert (stratified_order(labels, 0) == order).all() and (
        stratified_order(labels, 1) != order
    ).any()


def test_a_network_that_cannot_be_used_is_named_and_the_others_are_ranked():
    def gone():
        raise Unusable("not on this machine")

    broken = np.full((NUM, DIM), np.nan)
    table = {**networks(a=features(1), broken=broken, b=features(2)), "gone": gone}
    ranking = rank(table, LABELS, CLASSES, 1e9)
    assert [standing.name for standing in ranking.standings] == ["b", "a"]
    assert ranking.unusable == {
        "broken": "its features are not finite",
        "gone": "not on this machine",
    }
    assert not rank({"gone": gone}, LABELS, CLASSES, 1e9).standings


def test_without_time_the_first_network_is_tried_and_the_others_are_named():
    ranking = rank(networks(a=features(1), b=features(3), c=features(2)), LABELS, CLASSES, 0.0)
    assert [standing.name for standing in ranking.standings] == ["a"]
    assert ranking.untried == ["b", "c"] and ranking.is_cut


def test_a_round_that_runs_out_of_time_does_not_count(monkeypatch):
    monkeypatch.setattr(module, "FEWEST_IMAGES", 64)
    table = {f"n{i}": features(float(i), seed=i) for i in range(4)}
    ends: list[bool] = []

    def load(name):
        def of(chosen, deadline):
            ends.append(deadline is None)
            if len(ends) == 6:  # the second network of the second round
                raise module.OutOfTime
            return table[name][chosen]

        return lambda: of

    ranking = rank({name: load(name) for name in table}, LABELS, CLASSES, 1e9)
    assert [(s.name, s.num_images) for s in ranking.standings] == [
        (f"n{i}", 300) for i in (3, 2, 1, 0)
    ]
    assert ranking.is_cut and not ranking.untried
    assert ends == [True, *[False] * 5]  # the first network has no deadline


def test_a_further_round_is_as_large_as_there_is_time_for(monkeypatch):
    monkeypatch.setattr(module, "FEWEST_IMAGES", 64)
    table = {f"n{i}": features(float(i), seed=i) for i in range(4)}

    def load(name):
        def of(chosen, deadline):
            time.sleep(0.001 * len(chosen))
            return table[name][chosen]

        return lambda: of

    # the first round takes 1.2 s
    ranking = rank({name: load(name) for name in table}, LABELS, CLASSES, 1.0)
    assert {standing.num_images for standing in ranking.standings} <= {300} and ranking.is_cut


def test_the_score_is_that_of_the_head_on_the_features_themselves(monkeypatch):
    """Fewer dimensions, where there are fewer images than features, change no prediction of a regularised head."""
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    wide = np.eye(3, 200)[labels] * 4 + rng.standard_normal((60, 200))
    scores = cross_validated_scores(wide, labels, 3)
    monkeypatch.setattr(module, "_reduce_dimensions", lambda features: features)
    expected = cross_validated_scores(wide, labels, 3)
    # Both are solved to a gradient of 1e-8; at the weaker strength that is 1e-4 of the weights.
    np.testing.assert_allclose(scores, expected, rtol=1e-3)
    weight, bias = fit_head(wide, labels, 3, 1e-3)
    # the control: it is held out
    assert ((wide @ weight.T + bias).argmax(axis=1) == labels).mean() == 1 > scores[1]


@pytest.mark.parametrize("labels", [[0], [0, 1], [0, 0, 0, 1], [1, 1, 1, 1]])
def test_even_the_smallest_sets_have_a_score(labels):
    loss, accuracy, _ = cross_validated_scores(
        np.random.default_rng(0).standard_normal((len(labels), 3)), np.array(labels), 2
    )
    assert np.isfinite(loss) and 0 <= accuracy <= 1
