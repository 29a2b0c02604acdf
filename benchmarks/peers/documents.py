"""The results of `benchmarks.peers` as tables."""

import statistics
from collections.abc import Sequence

from benchmarks.common.baseline import LABEL, baseline_accuracies
from benchmarks.common.documents import markdown, spread
from benchmarks.peers.tools import IMAGE_SIZE, PREDICTING, TOOLS

Records = Sequence[dict]
_PREDICTORS = {
    "finetune": "finetune predict",
    "timm": "timm inference.py",
    "fastai": "fastai get_preds",
}
# Heading, name in the record, and digits.
_JOB_COLUMNS = (
    ("seconds", "seconds", 0),
    ("accuracy", "accuracy", 3),
    ("s to the first step", "first_step", 1),
    ("peak memory, MB", "memory_mb", 0),
)


def results_of(records: Records, experiment: str, tool: str, setting: str = "default") -> Records:
    """Return the successful runs of a tool with a setting."""
    wanted = (experiment, tool, setting)
    found = [r for r in records if (r["experiment"], r["tool"], r["setting"]) == wanted]
    return [r for r in found if "seconds" in r]


def cell(results: Records, name: str, digits: int) -> str:
    """Return median and extremes, a single value alone, a dash for no value."""
    numbers = [r[name] for r in results]
    if len(numbers) > 1:
        return spread(numbers, digits)
    return f"{numbers[0]:,.{digits}f}" if numbers else "–"


def when(results: Records) -> str:
    """Return when a row was measured, and with which of our commits."""
    ours = {r["commit"] for r in results if r["tool"] == "finetune" and "commit" in r}
    return ", ".join([*sorted({r["date"][5:] for r in results}), *sorted(ours)])


def machines(results: Records) -> list[str]:
    return sorted({r["machine"] for r in results})


def ratio(ours: Records, theirs: Records) -> str:
    """Return our median seconds divided by theirs, a dash if they were not measured on the same machine."""
    if not ours or not theirs or machines(ours) != machines(theirs):
        return "–"
    a, b = (statistics.median(r["seconds"] for r in results) for results in (ours, theirs))
    return f"{a / b:.2f}"


def job_table(records: Records) -> str:
    """Return the table of the complete jobs; `ours ÷ this` is the seconds of `finetune fit` divided by the row's."""
    ours = results_of(records, "job", "finetune")
    rows = []
    for tool, (name, settings) in TOOLS.items():
        for setting in settings:
            results = results_of(records, "job", tool, setting)
            label = f"{name}, {setting}" if len(settings) > 1 else name
            if results and machines(results) != machines(ours):
                label += f" (on {', '.join(machines(results))})"
            cells = [cell(results, key, digits) for _, key, digits in _JOB_COLUMNS]
            cells += [ratio(ours, results), str(len(results)), when(results)]
            rows.append([label, *cells])
    baseline = f"{baseline_accuracies(IMAGE_SIZE)['hotdog']:.3f}"
    rows.append([LABEL, "–", baseline, *["–"] * 5])
    head = ["", *(heading for heading, _, _ in _JOB_COLUMNS), "ours ÷ this", "n", "measured"]
    return markdown(head, rows)


def predict_table(records: Records) -> str:
    """Return how fast the tools predict."""
    rows = []
    for tool in PREDICTING:
        results = results_of(records, "predict", tool)
        figures = (("seconds", 1), ("rate", 0), ("memory_mb", 0))
        cells = [cell(results, name, digits) for name, digits in figures]
        rows.append([_PREDICTORS[tool], *cells, str(len(results)), when(results)])
    head = ["seconds, 800 images", "images/s without the start", "peak memory, MB"]
    return markdown(["", *head, "n", "measured"], rows)


def about(records: Records) -> str:
    """Return on which machines and when it was measured, and the versions of all tools."""
    days = sorted({r["date"] for r in records})
    versions = {f"{name} {version}" for r in records for name, version in r["versions"].items()}
    return f"{', '.join(machines(records))}, {', '.join(days)}; {', '.join(sorted(versions))}."


def tables(records: Records) -> dict[str, str]:
    """Return the blocks of benchmarks/NOTEBOOK.md and docs/benchmarks.md."""
    good = [r for r in records if "seconds" in r]
    return {
        "compare_about": about(good),
        "compare_job": job_table(good),
        "compare_predict": predict_table(good),
    }
