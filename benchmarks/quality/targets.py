"""What the points are compared with, as the sentences and the table of benchmarks/NOTEBOOK.md."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.common.documents import markdown
from benchmarks.quality.plan import number
from benchmarks.quality.points import Point, Records, mean_sets, name_of, over_sets

HALF = 0.5  # of a peer's seconds
ERROR_RATIO = 0.85
CALIBRATION = 0.05
TOLERANCE = 0.1  # of the minutes of a budget
_FROM = 1.0  # minutes

NOT_YET = "Not measured yet."


class Rival(NamedTuple):
    """The most accurate peer so far, and our result in the same time."""

    peer: Point
    ours: Point | None  # None: no budget of ours has ended by then
    error_ratio: float


def summary(records: Records) -> str:
    """Return a line for each target, and the errors at equal time."""
    points = over_sets(records)
    rivals = at_equal_time(points)
    verdicts = {
        "Each peer's accuracy in at most half of its seconds": speed(points),
        f"At equal time, an error of at most {ERROR_RATIO} of the best peer's": errors(rivals),
        f"Calibration error of the default at most {CALIBRATION} before scaling": (
            calibration(records)
        ),
        f"From 1 minute up `--minutes` takes as long as it says, within {TOLERANCE:.0%}": (
            punctuality(records)
        ),
    }
    lines = "\n".join(f"- {target}: {text or NOT_YET}" for target, text in verdicts.items())
    return f"{lines}\n\n{rivals_table(rivals)}"


def verdict(is_met: bool) -> str:
    return "met" if is_met else "missed"


def reached(points: Sequence[Point]) -> list[tuple[Point, float]]:
    """Return for each peer's point the share of its seconds after which ours are as accurate; infinite if never."""
    ours = [p for p in points if p.is_ours]
    shares = []
    for peer in points:
        if not peer.is_ours:
            enough = [p.seconds for p in ours if p.accuracy >= peer.accuracy]
            shares.append((peer, min(enough, default=math.inf) / peer.seconds))
    return shares


def speed(points: Sequence[Point]) -> str:
    shares = reached(points)
    slow = [f"{name_of(peer)} ({share:.2f})" for peer, share in shares if share > HALF]
    text = f"{verdict(not slow)}. {len(shares) - len(slow)} of {len(shares)} points of the peers"
    return f"{text}; not {', '.join(slow)}." if slow else f"{text}."


def within(points: Sequence[Point], seconds: float) -> Point | None:
    """Return the longest of our budgets that has ended by then: not the best one, by the test images."""
    budgets = [p for p in points if p.is_budget and p.seconds <= seconds]
    return max(budgets, key=lambda p: p.seconds, default=None)


def at_equal_time(points: Sequence[Point]) -> list[Rival]:
    """Return the errors at each time at which some peer is better than all before.

    Between these times the best peer stays the same and our budgets get no worse, so no time is skipped.
    """
    rivals: list[Rival] = []
    peers = [p for p in points if not p.is_ours]
    for peer in sorted(peers, key=lambda p: (p.seconds, -p.accuracy)):
        if not rivals or peer.accuracy > rivals[-1].peer.accuracy:
            ours = within(points, peer.seconds)
            ratio = (1 - ours.accuracy) / (1 - peer.accuracy) if ours else math.inf
            rivals.append(Rival(peer, ours, ratio))
    return rivals


def errors(rivals: Sequence[Rival]) -> str:
    if not rivals:
        return ""
    worst = max(rivals, key=lambda rival: rival.error_ratio)
    text = verdict(worst.error_ratio <= ERROR_RATIO)
    return f"{text}. The largest ratio is {worst.error_ratio:.2f}, next to {name_of(worst.peer)}."


def rivals_table(rivals: Sequence[Rival]) -> str:
    """Return the errors at equal time."""
    rows = []
    for peer, ours, ratio in rivals:
        own = ["none yet", "–", "–"]
        if ours:
            own = [name_of(ours), f"{1 - ours.accuracy:.3f}", f"{ratio:.2f}"]
        rows.append([name_of(peer), f"{peer.seconds:.0f}", f"{1 - peer.accuracy:.3f}", *own])
    head = ["best peer so far", "its seconds", "its error", "ours by then", "our error"]
    return markdown([*head, "ours ÷ its"], rows)


def punctuality(records: Records) -> str:
    """Return how many of our runs with a budget took as long as it says; each run is a promise of its own."""
    num_runs = 0
    late = []
    for r in records:
        is_budget = r["tool"] == "finetune" and r["setting"].startswith("minutes")
        if is_budget and "seconds" in r and number(r["setting"]) >= _FROM:
            num_runs += 1
            minutes = number(r["setting"])
            if abs(r["seconds"] / (60 * minutes) - 1) > TOLERANCE:
                late.append(f"{minutes:g} min, {r['set']}, {r['seconds']:.0f} s")
    if not num_runs:
        return ""
    text = f"{verdict(not late)}. {num_runs - len(late)} of {num_runs} runs"
    return f"{text}; not {'; '.join(late)}." if late else f"{text}."


def calibration(records: Records) -> str:
    """Return means over sets and seeds; one set has so few images that true probabilities have an error, too."""
    sets = mean_sets(records)
    found = [
        r
        for r in records
        if (r["tool"], r["setting"]) == ("finetune", "default")
        and r["set"] in sets
        and "calibration_error_before_scaling" in r
    ]
    if not found:
        return ""
    before = statistics.fmean(r["calibration_error_before_scaling"] for r in found)
    after = statistics.fmean(r["calibration_error"] for r in found)
    if_true = statistics.fmean(r["calibration_error_if_true"] for r in found)
    text = f"{verdict(before <= CALIBRATION)}. {before:.3f}, after scaling {after:.3f} (n = {len(found)})"
    return f"{text}; with so few images {if_true:.3f} would be measured if all probabilities were true."
