"""The results of `benchmarks.peers` as tables in benchmarks/NOTEBOOK.md and as the chart docs/compare.png."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.documents import chart, markdown, spread
from benchmarks.peers.tools import CANNOT, PREDICTING, TOOLS

Records = Sequence[dict]
_START = [("s to the first step", "first_step", 1), ("peak memory, MB", "memory_mb", 0)]
_PREDICTORS = {"finetune": "finetune predict", "timm": "timm inference.py"}
_PREDICTORS |= {"fastai": "fastai get_preds"}
# experiment: (heading, name in the record and digits of each column; what the last column divides)
_COLUMNS = {
    "throughput": (
        [("images/s, later epoch", "later_rate", 0), ("first epoch", "first_rate", 0), *_START],
        "later_rate",
    ),
    "job": ([("seconds", "seconds", 0), ("accuracy", "accuracy", 3), *_START], "seconds"),
    "head": (
        [
            ("seconds", "seconds", 0),
            ("seconds of a later epoch", "later_seconds", 2),
            ("accuracy", "accuracy", 3),
        ],
        "seconds",
    ),
}


def results_of(records: Records, experiment: str, tool: str, setting: str = "default") -> Records:
    wanted = (experiment, tool, setting)
    return [r for r in records if (r["experiment"], r["tool"], r["setting"]) == wanted]


def rows() -> list[tuple[str, str, str]]:
    """Return tool, setting and its name in a table, in the order of the tables."""
    return [
        (tool, setting, f"{name}, {setting}" if len(settings) > 1 else name)
        for tool, (name, settings) in TOOLS.items()
        for setting in settings
    ]


def values(results: Records, name: str) -> list[float]:
    return [r[name] for r in results if name in r]


def cell(results: Records, name: str, digits: int) -> str:
    """Return median and extremes, a single value alone, a dash for no value."""
    numbers = values(results, name)
    # Repeats of one seed have no spread.
    if name == "accuracy" and len(set(numbers)) == 1:
        numbers = numbers[:1]
    if len(numbers) > 1:
        return spread(numbers, digits)
    return f"{numbers[0]:,.{digits}f}" if numbers else "–"


def when(results: Records) -> str:
    """Return when a row was measured, and with which of our commits."""
    ours = {r["commit"] for r in results if r["tool"] == "finetune" and "commit" in r}
    return ", ".join([*sorted({r["date"][5:] for r in results}), *sorted(ours)])


def machines(results: Records) -> set[str]:
    return {r["machine"] for r in results if "machine" in r}


def ratio(ours: Records, theirs: Records, name: str) -> str:
    """Return our median divided by theirs, a dash if they were not measured on the same machine."""
    a, b = values(ours, name), values(theirs, name)
    is_fair = machines(ours) == machines(theirs)
    return f"{statistics.median(a) / statistics.median(b):.2f}" if a and b and is_fair else "–"


def table(records: Records, experiment: str) -> str:
    """Return the table of one experiment; `ours ÷ this` is the value of `finetune fit` divided by the row's."""
    columns, compared = _COLUMNS[experiment]
    head = ["", *(heading for heading, _, _ in columns), "ours ÷ this", "n", "measured"]
    lines = markdown(head, []).splitlines()
    ours = results_of(records, experiment, "finetune")
    for tool, setting, name in rows():
        results = results_of(records, experiment, tool, setting)
        good = [r for r in results if "seconds" in r]
        if good:
            cells = [cell(good, key, digits) for _, key, digits in columns]
            if machines(good) != machines(ours):
                name += f" (on {', '.join(sorted(machines(good)))})"
            cells += [ratio(ours, good, compared), str(len(good)), when(good)]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        else:
            reason = CANNOT.get((experiment, tool)) or (
                f"failed: `{results[0]['failed']}`" if results else "not measured"
            )
            lines.append(f"| {name} | {reason.replace('|', '/')} |" + " |" * (len(head) - 2))
    return "\n".join(lines)


def predict_table(records: Records) -> str:
    """Return how fast the tools predict."""
    head = "seconds, 800 images | images/s without the start | peak memory, MB | n | measured"
    lines = [f"| | {head} |", "| --- | --- | --- | --- | --- | --- |"]
    for tool in PREDICTING:
        good = [r for r in results_of(records, "predict", tool) if "seconds" in r]
        cells = [cell(good, "seconds", 1), cell(good, "rate", 0), cell(good, "memory_mb", 0)]
        cells += [str(len(good)), when(good)]
        lines.append(f"| {_PREDICTORS[tool]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def about(records: Records) -> str:
    """Return on which machine and when ours were measured in each experiment, and the versions of all."""
    if not records:
        return "Not measured yet."
    versions = {f"{name} {version}" for r in records for name, version in r["versions"].items()}
    places: dict[str, list[str]] = {}
    for experiment in dict.fromkeys(r["experiment"] for r in records):
        ours = [r for r in results_of(records, experiment, "finetune") if "machine" in r]
        if ours:
            days = ", ".join(sorted({r["date"] for r in ours}))
            places.setdefault(f"{', '.join(sorted(machines(ours)))}, {days}", []).append(experiment)
    parts = [f"{', '.join(experiments)} on {place}" for place, experiments in places.items()]
    ours = f"Ours: {'; '.join(parts)}. " if parts else ""
    return f"{ours}{', '.join(sorted(versions))}."


def tables(records: Records) -> dict[str, str]:
    """Return the blocks of benchmarks/NOTEBOOK.md."""
    blocks = {f"compare_{experiment}": table(records, experiment) for experiment in _COLUMNS}
    if has_chart(records):
        blocks["compare_throughput"] += "\n\n![Images per second of each tool](../docs/compare.png)"
    return {
        "compare_about": about(records),
        **blocks,
        "compare_predict": predict_table(records),
    }


def has_chart(records: Records) -> bool:
    return any(r["experiment"] == "throughput" and "later_rate" in r for r in records)


def draw(records: Records, path: Path) -> None:
    """Draw a bar for each tool's median pictures per second in a later epoch, a line from smallest to largest."""
    bars = [
        (name, values(results_of(records, "throughput", tool, setting), "later_rate"), tool)
        for tool, setting, name in rows()
    ]
    bars = [bar for bar in bars if bar[1]]
    with chart(path, (8.5, 0.4 * len(bars) + 1.0)) as (_, axes):
        for y, (_, numbers, tool) in enumerate(bars):
            colour = "#c2410c" if tool == "finetune" else "#94a3b8"
            axes.barh(y, statistics.median(numbers), height=0.65, color=colour)
            axes.plot([min(numbers), max(numbers)], [y, y], color="#1e293b", lw=1.5)
        axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
        axes.invert_yaxis()
        axes.set_xlabel(
            "images per second while training ResNet-18 at 128 pixels, an epoch after the first"
        )
        axes.grid(axis="x", alpha=0.3)
