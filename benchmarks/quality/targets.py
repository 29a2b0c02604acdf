"""What was aimed at, and whether the points reach it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.quality.plan import SETS, number
from benchmarks.quality.points import Point, Records, on_set

HALF, FIFTH = 0.5, 0.2  # of a peer's seconds
ERROR_RATIO = 0.85
STANDARD_ERRORS = 2.0
CALIBRATION = 0.05
TOLERANCE = 0.1  # of the minutes given
_FROM = 1.0  # minutes


class Rival(NamedTuple):
    """A peer's point beside what we give in the same time."""

    peer: Point
    ours: Point | None  # None: no budget of ours is over by then
    value: float  # what is held against a target


def reached(points: Sequence[Point]) -> list[tuple[Point, float]]:
    """Return of each peer's point in which part of its seconds we are as accurate; infinite where never."""
    ours = [p for p in points if p.is_ours]
    least = {
        peer: min((p.seconds for p in ours if p.accuracy >= peer.accuracy), default=math.inf)
        for peer in points
        if not peer.is_ours
    }
    return [(peer, seconds / peer.seconds) for peer, seconds in least.items()]


def budgets_kept(records: Records) -> list[tuple[dict, float]]:
    """Return our runs of at least a minute that were told how long, each with its seconds divided by those."""
    ours = [
        r
        for r in records
        if r["tool"] == "finetune" and r["setting"].startswith("minutes") and "seconds" in r
    ]
    return [
        (r, r["seconds"] / (60 * number(r["setting"])))
        for r in ours
        if number(r["setting"]) >= _FROM
    ]


def no_better(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Return our budgets of at least a minute that give no more than a shorter one, each with the best of those."""
    budgets = sorted(
        (p for p in points if p.is_budget and number(p.setting) >= _FROM),
        key=lambda p: number(p.setting),
    )
    pairs = [
        (longer, max(budgets[:i], key=lambda p: p.accuracy))
        for i, longer in enumerate(budgets)
        if i
    ]
    return [(longer, shorter) for longer, shorter in pairs if longer.accuracy <= shorter.accuracy]


def within(points: Sequence[Point], seconds: float) -> Point | None:
    """Return the longest of our budgets that is over by then: not the best one, by the test pictures."""
    budgets = [p for p in points if p.is_budget and p.seconds <= seconds]
    return max(budgets, key=lambda p: p.seconds, default=None)


def at_equal_time(points: Sequence[Point]) -> list[Rival]:
    """Return the ratio of errors, ours to the peer's, at each time at which some peer is better than all before.

    Between these times the best peer stays the same and we get no worse budget, so that none is left out.
    """
    rivals: list[Rival] = []
    for peer in sorted(
        (p for p in points if not p.is_ours), key=lambda p: (p.seconds, -p.accuracy)
    ):
        if not rivals or peer.accuracy > rivals[-1].peer.accuracy:
            ours = within(points, peer.seconds)
            rivals.append(Rival(peer, ours, error_ratio(ours, peer)))
    return rivals


def error_ratio(ours: Point | None, peer: Point) -> float:
    """Return our error divided by a peer's; infinite where we have none yet, or the peer makes no error and we do."""
    if ours is None or peer.accuracy == 1 > ours.accuracy:
        return math.inf
    return (1 - ours.accuracy) / (1 - peer.accuracy) if peer.accuracy < 1 else 1.0


def ahead(records: Records) -> list[tuple[str, Rival]]:
    """Return of each set and peer's point by how many standard errors it is ahead of ours at equal time.

    The standard error is that of two shares of `num_test` pictures, as if they were not the same pictures: too large
    rather than too small.
    """
    rivals = []
    for name in SETS:
        points = on_set(records, name)
        num = next((r["num_test"] for r in records if r["set"] == name and "num_test" in r), 0)
        for peer in (p for p in points if not p.is_ours):
            ours = within(points, peer.seconds)
            rivals.append((name, Rival(peer, ours, standard_errors(ours, peer, num))))
    return rivals


def standard_errors(ours: Point | None, peer: Point, num_test: int) -> float:
    """Return by how many standard errors a peer is ahead; negative where we are."""
    if ours is None:
        return math.inf
    difference = peer.accuracy - ours.accuracy
    variance = sum(p.accuracy * (1 - p.accuracy) / num_test for p in (ours, peer))
    return (
        difference / math.sqrt(variance)
        if variance
        else math.copysign(math.inf, difference)
        if difference
        else 0.0
    )
