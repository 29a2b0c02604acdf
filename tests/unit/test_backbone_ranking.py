"""The ranking of `--backbone auto` finds the most informative network, within its time."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.features.backbone_ranking import (
    Ranking,
    Unusable,
    cross_validated_scores,
    rank,
    stratified_order,
)
from finetune.features.logistic_regression import fit_probe, principal_coordinates

NUM = 600
CLASSES = 4
DIM = 8
LABELS = np.random.default_rng(0).integers(0, CLASSES, NUM)


def features(signal: float, labels: np.ndarray = LABELS, seed: int = 1) -> np.ndarray:
    """Features whose class means lie `signal` standard deviations from the centre."""
    rng = np.random.default_rng(seed)
    means = np.eye(CLASSES, DIM) * signal
    return means[labels] + rng.standard_normal((len(labels), DIM))


def networks(table: dict[str, np.ndarray], before=lambda name, index: None) -> dict:
    """Networks by name with these features of each image; `before` is called before each of them."""

    def load(name: str):
        def of(chosen):
            for index in chosen.tolist():
                before(name, index)
                yield table[name][index]

        return lambda: of

    return {name: load(name) for name in table}


FOUR = {f"n{i}": features(float(i), seed=i) for i in range(4)}  # the first is noise


@pytest.fixture(scope="module")
def ranked() -> tuple[Ranking, dict[str, list[int]]]:
    """The ranking of these networks, and the images that each was asked for."""
    asked: dict[str, list[int]] = {}

    def ask(name, index):
        asked.setdefault(name, []).append(index)

    return rank(networks(FOUR, ask), LABELS, CLASSES, 1e9), asked


def test_the_informative_network_wins_and_noise_is_at_chance(ranked):
    strongest, strong, weak, noise = ranked[0].standings
    assert [strongest.name, strong.name, weak.name, noise.name] == ["n3", "n2", "n1", "n0"]
    assert strongest.accuracy > 0.9 > weak.accuracy > 0.4
    # A quarter by chance; the standard error of 512 images is 0.02.
    assert noise.accuracy < 0.25 + 4 * 0.025
    # the control: no network predicts these
    shuffled = np.random.default_rng(3).permutation(LABELS)
    two = {name: FOUR[name] for name in ("n0", "n3")}
    standings = rank(networks(two), shuffled, CLASSES, 1e9).standings
    assert all(standing.accuracy < 0.36 for standing in standings)


def test_each_network_is_asked_once_for_the_same_images(ranked):
    ranking, asked = ranked
    assert {standing.num_images for standing in ranking.standings} == {512}
    assert len({tuple(rows) for rows in asked.values()}) == 1
    assert all(len(set(rows)) == len(rows) == 512 for rows in asked.values())
    assert not ranking.untried
    again = rank(networks(FOUR), LABELS, CLASSES, 1e9)
    scores = [[(one.name, one.loss) for one in each.standings] for each in (ranking, again)]
    assert scores[0] == scores[1]


@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=5), seed=st.integers(0, 9))
def test_each_beginning_of_the_order_has_the_shares_of_the_classes(sizes, seed):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    order = stratified_order(labels, seed)
    assert sorted(order) == list(range(len(labels)))
    for num in (len(labels) // 4, len(labels) // 2):
        counts = np.bincount(labels[order[:num]], minlength=len(sizes))
        assert np.abs(counts - num * np.array(sizes) / len(labels)).max() <= len(sizes)
    assert (stratified_order(labels, seed) == order).all()
    assert len(labels) < 20 or (stratified_order(labels, seed + 1) != order).any()


def test_a_network_that_cannot_be_used_is_named_and_the_others_are_ranked():
    def gone():
        raise Unusable("not on this machine")

    table = {"a": features(1), "broken": np.full((NUM, DIM), np.nan), "b": features(2)}
    ranking = rank({**networks(table), "gone": gone}, LABELS, CLASSES, 1e9)
    assert [standing.name for standing in ranking.standings] == ["b", "a"]
    assert ranking.unusable.keys() == {"broken", "gone"}
    assert "not finite" in ranking.unusable["broken"]
    assert not rank({"gone": gone}, LABELS, CLASSES, 1e9).standings


def test_without_time_the_first_network_is_tried_and_the_others_are_named():
    ranking = rank(networks(FOUR), LABELS, CLASSES, 0.0)
    assert [standing.name for standing in ranking.standings] == ["n0"]
    assert ranking.untried == ["n1", "n2", "n3"]


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time of the ranking, which only the test moves."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_network_that_runs_out_of_time_is_untried(clock):
    def wait(name, _):
        clock[0] += name == "n2"

    ranking = rank(networks(FOUR, wait), LABELS, CLASSES, 100.0)
    assert [standing.name for standing in ranking.standings] == ["n1", "n0"]
    assert ranking.untried == ["n2", "n3"]


def test_a_slow_first_network_has_fewer_images_so_that_others_are_ranked_on_the_same(clock):
    labels = np.arange(1000) % 70
    rows = np.random.default_rng(0).standard_normal((1000, 2))

    def wait(name, _):
        clock[0] += 0.125

    # 8 images of each class would take 70 s for each network
    ranking = rank(networks({"a": rows, "b": rows}, wait), labels, 70, 264.0)
    assert [standing.num_images for standing in ranking.standings] == [529, 529]
    assert ranking.untried == []
    (alone,) = rank(networks({"a": rows}, wait), labels, 70, 8.0).standings
    assert alone.num_images == 512


def test_the_score_is_that_of_the_head_on_the_features_themselves():
    """Fewer dimensions, where there are fewer images than features, change no prediction of a regularised head."""
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    wide = np.eye(3, 200)[labels] * 4 + rng.standard_normal((60, 200))
    scores = cross_validated_scores(wide, labels, 3)
    # along their axes there are as many features as images, which stay as they are
    expected = cross_validated_scores(principal_coordinates(wide), labels, 3)
    # Both are solved to a gradient of 1e-8; at the weaker strength that is 1e-4 of the weights.
    np.testing.assert_allclose(scores, expected, rtol=1e-3)
    probe = fit_probe(wide, labels, 3, [1e-3])
    # the control: it is held out
    assert ((wide @ probe.weight.T + probe.bias).argmax(axis=1) == labels).mean() == 1 > scores[1]


@pytest.mark.parametrize("labels", [[0], [0, 1], [0, 0, 0, 1], [1, 1, 1, 1]])
def test_even_the_smallest_sets_have_a_score(labels):
    found = np.random.default_rng(0).standard_normal((len(labels), 3))
    loss, accuracy, _ = cross_validated_scores(found, np.array(labels), 2)
    assert np.isfinite(loss) and 0 <= accuracy <= 1
