"""The records as tables and sentences of benchmarks/NOTEBOOK.md."""

import math
import statistics
from collections.abc import Sequence

from benchmarks.common.documents import markdown, mean_and_spread, period
from benchmarks.peers.tools import TOOLS
from benchmarks.quality import targets
from benchmarks.quality.plan import SEEDS, SETS, number
from benchmarks.quality.points import (
    Point,
    Records,
    main_machine,
    mean_sets,
    on_set,
    over_sets,
    rows,
)

NOT_YET = "Not measured yet."


def label(tool: str, setting: str) -> str:
    """Return what a table calls a tool with a setting."""
    name = TOOLS[tool][0]
    if setting == "default":
        return name
    word, num = setting.partition("_")[0], number(setting)
    if tool == "finetune":
        return f"{name} --{word} {num:g}"
    return f"{name}, 1 + {num - 1:g} epochs" if tool == "fastai" else f"{name}, {num:g} epochs"


def name_of(point: Point) -> str:
    return label(point.tool, point.setting)


def cell(point: Point | None) -> str:
    if point is None:
        return "–"
    some = f" (n = {len(point.accuracies)})" if 1 < len(point.accuracies) < len(SEEDS) else ""
    return f"{mean_and_spread(point.accuracies, 3)}{some}, {point.seconds:.0f} s"


def table(records: Records) -> str:
    """Return accuracy and seconds of each tool and setting on each set, and the mean over the sets."""
    names = [name for name in SETS if any(r["set"] == name for r in records)]
    nums = {r["set"]: r["num_test"] for r in records if "num_test" in r}
    columns = {
        f"{name}, {nums.get(name, '–')}": {p[:2]: p for p in on_set(records, name)}
        for name in names
    }
    columns["mean"] = {p[:2]: p for p in over_sets(records)}
    failed = {(r["set"], r["tool"], r["setting"]): r["failed"] for r in records if "failed" in r}
    lines = []
    for row in rows():
        if not any(row in points for points in columns.values()) and row not in {
            key[1:] for key in failed
        }:
            continue
        cells = [label(*row), *(cell(points.get(row)) for points in columns.values())]
        for i, name in enumerate(names):
            if (name, *row) in failed and row not in columns[list(columns)[i]]:
                cells[i + 1] = "failed"
        lines.append(cells)
    shown = markdown(["", *columns], lines)
    reasons = [
        f"- {label(*row)}, {name}, failed: `{text}`" for (name, *row), text in failed.items()
    ]
    return "\n".join([shown, "", *reasons]) if reasons else shown


def means(records: Records) -> str:
    """Return the mean accuracy over the sets and the seconds of each tool and setting."""
    points = sorted(over_sets(records), key=lambda point: point.seconds)
    rows = [
        [name_of(p), f"{p.seconds:.0f}", mean_and_spread(p.accuracies, 3), str(len(p.accuracies))]
        for p in points
    ]
    return markdown(["tool", "seconds", "mean accuracy", "seeds"], rows)


def about(records: Records) -> str:
    """Return with what, where and when it was measured on one machine, and what the means are of."""
    versions = sorted(
        {f"{name} {version}" for r in records for name, version in r["versions"].items()}
    )
    ours = sorted({r["commit"] for r in records if r["tool"] == "finetune"})
    when = period({r["date"] for r in records})
    parts = [
        f"{records[0]['machine']}, {when}; {', '.join(versions)}",
        f"finetune at {', '.join(ours) or '–'}",
        f"the means are over {', '.join(mean_sets(records)) or 'no set'}",
    ]
    return f"{'; '.join(parts)}."


def verdict(is_met: bool) -> str:
    return "met" if is_met else "missed"


def listed(parts: Sequence[tuple[Point, float]]) -> str:
    """Return names with their values; `never` for what has none."""
    return ", ".join(
        f"{name_of(p)} ({f'{part:.2f}' if math.isfinite(part) else 'never'})" for p, part in parts
    )


def summary(records: Records) -> str:
    """Return a line for each target, and the errors at equal time."""
    points = over_sets(records)
    has_peers = any(not p.is_ours for p in points)
    has_ours = any(p.is_ours for p in points)
    num_budgets = sum(p.is_budget for p in points)
    rivals = targets.at_equal_time(points) if num_budgets else []
    tolerance = f"{targets.TOLERANCE:.0%}"
    verdicts = {
        "Each peer's accuracy in at most half of its seconds, aim a fifth": (
            has_peers and has_ours and speed(points)
        ),
        f"At equal time, an error of at most {targets.ERROR_RATIO} of the best peer's": (
            rivals and errors(rivals)
        ),
        "At equal time, no set where a peer is ahead by more than two standard errors": (
            rivals and sets_lost(records)
        ),
        f"Calibration error of the default at most {targets.CALIBRATION} before scaling": (
            calibration(records)
        ),
        f"From 1 minute up `--minutes` takes as long as it says, within {tolerance}": (
            punctuality(records)
        ),
        "From 1 minute up more minutes give more": num_budgets > 1 and growth(points),
    }
    lines = "\n".join(f"- {target}: {text or NOT_YET}" for target, text in verdicts.items())
    return f"{lines}\n\n{rivals_table(rivals)}" if rivals else lines


def rivals_table(rivals: Sequence[targets.Rival]) -> str:
    """Return the errors at equal time."""
    rows = []
    for peer, ours, ratio in rivals:
        own = ["none yet", "–", "–"]
        if ours:
            own = [name_of(ours), f"{1 - ours.accuracy:.3f}", f"{ratio:.2f}"]
        rows.append([name_of(peer), f"{peer.seconds:.0f}", f"{1 - peer.accuracy:.3f}", *own])
    head = ["best peer so far", "its seconds", "its error", "ours by then", "our error"]
    return markdown([*head, "ours ÷ its"], rows)


def speed(points: Sequence[Point]) -> str:
    parts = targets.reached(points)
    slow = [(peer, part) for peer, part in parts if part > targets.HALF]
    text = f"{verdict(not slow)}. {len(parts) - len(slow)} of {len(parts)} points of the peers in half, "
    text += f"{sum(part <= targets.FIFTH for _, part in parts)} in a fifth"
    return f"{text}; not in half: {listed(slow)}." if slow else f"{text}."


def errors(rivals: Sequence[targets.Rival]) -> str:
    worst = max(rivals, key=lambda rival: rival.value)
    text = verdict(worst.value <= targets.ERROR_RATIO)
    if worst.ours is None:
        return f"{text}. None of our budgets ends as soon as {name_of(worst.peer)}."
    return f"{text}. The largest ratio is {worst.value:.2f}, next to {name_of(worst.peer)}."


def sets_lost(records: Records) -> str:
    rivals = targets.ahead(records)
    compared = [(name, r) for name, r in rivals if r.ours is not None]
    lost = [
        f"{name}: {name_of(r.peer)} by {r.value:.1f}"
        for name, r in compared
        if r.value > targets.STANDARD_ERRORS
    ]
    parts = [verdict(not lost)] if compared else []
    if lost:
        parts.append(f"Ahead are {', '.join(lost)}")
    parts.append(f"{len(compared)} of {len(rivals)} points are compared")
    if len(compared) < len(rivals):
        parts[-1] += ", the others end before any of our budgets"
    return f"{'. '.join(parts)}."


def punctuality(records: Records) -> str:
    """Of every run: each is a promise of its own."""
    runs = targets.budgets_kept(records)
    if not runs:
        return ""
    late = [(r, part) for r, part in runs if abs(part - 1) > targets.TOLERANCE]
    named = [f"{number(r['setting']):g} min, {r['set']}, {r['seconds']:.0f} s" for r, _ in late]
    text = f"{verdict(not late)}. {len(runs) - len(late)} of {len(runs)} runs"
    return f"{text}; not {'; '.join(named)}." if late else f"{text}."


def growth(points: Sequence[Point]) -> str:
    pairs = targets.no_better(points)
    named = [
        f"{name_of(longer)} {longer.accuracy:.3f}, {name_of(less)} {less.accuracy:.3f}"
        for longer, less in pairs
    ]
    return f"{verdict(not pairs)}. {'; '.join(named)}." if pairs else f"{verdict(True)}."


def calibration(records: Records) -> str:
    """Return means over sets and seeds; one set's pictures are so few that true probabilities have an error, too."""
    sets = mean_sets(records)
    wanted = [
        r
        for r in records
        if (r["tool"], r["setting"]) == ("finetune", "default") and r["set"] in sets
    ]
    found = [r for r in wanted if "calibration_error_before_scaling" in r]
    if not found:
        return ""
    names = ("calibration_error_before_scaling", "calibration_error", "calibration_error_if_true")
    before, after, if_true = (statistics.fmean(r[name] for r in found) for name in names)
    text = f"{verdict(before <= targets.CALIBRATION)}. {before:.3f}, after scaling {after:.3f} (n = {len(found)})"
    return f"{text}; with so few images {if_true:.3f} would be measured if all probabilities were true."


def blocks(records: Records) -> dict[str, str]:
    """Return the blocks of benchmarks/NOTEBOOK.md: of the machine with the most results, and of all others."""
    here = of_one_machine(records)
    if not here:
        return dict.fromkeys(
            (
                "quality_about",
                "quality_accuracy",
                "quality_targets",
                "quality_elsewhere",
                "quality_means",
            ),
            NOT_YET,
        )
    shown = table(here)
    if has_chart(records):
        shown += (
            "\n\n![Mean accuracy over the sets against seconds, of each tool](../docs/quality.png)"
        )
    return {
        "quality_about": about(here),
        "quality_accuracy": shown,
        "quality_targets": summary(here),
        "quality_elsewhere": elsewhere(records) or NOT_YET,
        "quality_means": means(here),
    }


def elsewhere(records: Records) -> str:
    """Return of each other machine what is shown of the main one."""
    others = sorted({r["machine"] for r in records} - {main_machine(records)})
    of_each = [[r for r in records if r["machine"] == machine] for machine in others]
    return "\n\n".join(f"{about(found)}\n\n{table(found)}\n\n{summary(found)}" for found in of_each)


def of_one_machine(records: Records) -> list[dict]:
    """Return the records of the machine with the most results."""
    return [r for r in records if r["machine"] == main_machine(records)]


def has_chart(records: Records) -> bool:
    return bool(over_sets(of_one_machine(records)))
