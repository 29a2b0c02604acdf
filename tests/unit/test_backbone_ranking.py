"""The ranking of `--backbone auto`: successive halving finds the most informative network, within its time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.features.backbone_ranking import (
    OutOfTime,
    Ranking,
    Unusable,
    cross_validated_scores,
    rank,
    stratified_order,
)
from finetune.features.logistic_regression import fit_head, principal_coordinates

NUM = 600
CLASSES = 4
DIM = 8
LABELS = np.random.default_rng(0).integers(0, CLASSES, NUM)


def features(signal: float, labels: np.ndarray = LABELS, seed: int = 1) -> np.ndarray:
    """Features whose class means lie `signal` standard deviations from the centre."""
    rng = np.random.default_rng(seed)
    means = np.eye(CLASSES, DIM) * signal
    return means[labels] + rng.standard_normal((len(labels), DIM))


def networks(table: dict[str, np.ndarray], before=lambda name, chosen, deadline: None) -> dict:
    """Networks by name with these features of each image; `before` is called with what each is asked for."""

    def load(name: str):
        def of(chosen, deadline):
            before(name, chosen, deadline)
            return table[name][chosen]

        return lambda: of

    return {name: load(name) for name in table}


FOUR = {f"n{i}": features(float(i), seed=i) for i in range(4)}  # the first is noise


@pytest.fixture(scope="module")
def ranked() -> tuple[Ranking, dict[str, list[int]]]:
    """The ranking of these networks, and the images that each was asked for."""
    asked: dict[str, list[int]] = {}

    def ask(name, chosen, _):
        asked.setdefault(name, []).extend(chosen.tolist())

    return rank(networks(FOUR, ask), LABELS, CLASSES, 1e9), asked


def test_the_informative_network_wins_and_noise_is_at_chance(ranked):
    strongest, strong, weak, noise = ranked[0].standings
    assert [strongest.name, strong.name, weak.name, noise.name] == ["n3", "n2", "n1", "n0"]
    assert strongest.accuracy > 0.9 > weak.accuracy > 0.4
    # A quarter by chance; the standard error of 300 images is 0.025.
    assert noise.accuracy < 0.25 + 4 * 0.025
    # the control: no network predicts these
    shuffled = np.random.default_rng(3).permutation(LABELS)
    two = {name: FOUR[name] for name in ("n0", "n3")}
    standings = rank(networks(two), shuffled, CLASSES, 1e9).standings
    assert all(standing.accuracy < 0.36 for standing in standings)


def test_the_better_half_continues_with_more_images_and_none_is_asked_for_twice(ranked):
    ranking, asked = ranked
    nums = [standing.num_images for standing in ranking.standings]
    assert nums[0] == nums[1] == NUM == 2 * nums[2] == 2 * nums[3]
    assert {name: len(set(rows)) for name, rows in asked.items()} == {
        standing.name: standing.num_images for standing in ranking.standings
    }
    assert all(len(set(rows)) == len(rows) for rows in asked.values())
    assert not ranking.is_cut and not ranking.untried


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
    assert ranking.untried == ["n1", "n2", "n3"] and ranking.is_cut


def test_a_round_that_runs_out_of_time_does_not_count():
    deadlines: list[float | None] = []

    def end(name, chosen, deadline):
        deadlines.append(deadline)
        if len(deadlines) == 6:  # the second network of the second round
            raise OutOfTime

    ranking = rank(networks(FOUR, end), LABELS, CLASSES, 1e9)
    assert [standing.name for standing in ranking.standings] == ["n3", "n2", "n1", "n0"]
    assert len({standing.num_images for standing in ranking.standings}) == 1
    assert ranking.is_cut and not ranking.untried
    # the first network has no deadline
    assert [deadline is None for deadline in deadlines] == [True, *[False] * 5]


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
    weight, bias = fit_head(wide, labels, 3, 1e-3)
    # the control: it is held out
    assert ((wide @ weight.T + bias).argmax(axis=1) == labels).mean() == 1 > scores[1]


@pytest.mark.parametrize("labels", [[0], [0, 1], [0, 0, 0, 1], [1, 1, 1, 1]])
def test_even_the_smallest_sets_have_a_score(labels):
    found = np.random.default_rng(0).standard_normal((len(labels), 3))
    loss, accuracy, _ = cross_validated_scores(found, np.array(labels), 2)
    assert np.isfinite(loss) and 0 <= accuracy <= 1
