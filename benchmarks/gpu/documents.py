"""What was measured, as tables for benchmarks/NOTEBOOK.md, and whether they reach what was aimed at."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.common.documents import markdown, spread
from benchmarks.gpu.jobs import CACHED, TORCHVISION

Records = Sequence[dict[str, Any]]

LEAST_OF_LIMIT, LEAST_OF_TORCHVISION = 0.95, 3.0


def document(records: Records) -> str:
    """Return the tables and the targets."""
    words = {None: "not measured", True: "met", False: "missed"}
    lines = []
    for target in targets(records):
        value = "" if target["value"] is None else f": {target['value']:.2f} times"
        lines.append(f"- {words[target['met']]}: {target['target']}{value}")
    return "\n\n".join([limits(records), roads(records), jobs(records), "\n".join(lines)])


def limits(records: Records) -> str:
    """Return pictures per second on the device: a row for each way, a column for each batch."""
    found = [r for r in records if r["kind"] == "limit"]
    sizes = sorted({r["batch_size"] for r in found})
    rows = []
    for way in dict.fromkeys(_way(r) for r in sorted(found, key=_order)):
        mode, precision, channels_last, compiled = way
        by_size = {r["batch_size"]: r for r in found if _way(r) == way}
        cells = [mode, precision, "yes" if channels_last else "no", "yes" if compiled else "no"]
        for size in sizes:
            record = by_size.get(size, {})
            peak = f", {record['peak_gb']:.1f} GB" if record.get("peak_gb") else ""
            cells.append(_cell(record) + peak)
        starts = [r["first_step_seconds"] for r in by_size.values() if "first_step_seconds" in r]
        rows.append([*cells, spread(starts, 1) if starts else "–"])
    batches = [f"images/s, batch {size}; peak memory" for size in sizes]
    head = ["step", "precision", "channels_last", "compiled", *batches]
    return markdown([*head, "seconds of the first step"], rows)


def roads(records: Records) -> str:
    """Return pictures per second from files and from the cache: a row for each number of workers."""
    found = {(r["num_workers"], r["cached"]): r for r in records if r["kind"] == "road"}
    rows = [
        [str(num), *(_cell(found.get((num, cached), {})) for cached in (False, True))]
        for num in sorted({num for num, _ in found})
    ]
    return markdown(["workers", "from files, images/s", "from the cache"], rows)


def jobs(records: Records) -> str:
    """Return pictures per second of whole jobs, and by the clock the share of the limit."""
    rows = []
    for job in sorted((r for r in records if r["kind"] == "job"), key=lambda r: r["batch_size"]):
        cells = [job["road"], str(job["batch_size"]), str(job.get("num_workers", "–")), _cell(job)]
        cells.append(spread(job["printed"], 0) if "printed" in job else "–")
        share = _ratio(job, limit_of(records, job["batch_size"]))
        rows.append([*cells, f"{share:.2f}" if share else "–"])
    head = ["job", "batch", "workers", "images/s, wall clock", "as printed", "share of the limit"]
    return markdown(head, rows)


def targets(records: Records) -> list[dict[str, Any]]:
    """Return for each batch what the job with the cache is to reach, its value, and whether it is met."""
    found = []
    by_key = {(r["road"], r["batch_size"]): r for r in records if r["kind"] == "job"}
    for size in sorted({size for _, size in by_key}):
        torchvision = by_key.get((TORCHVISION, size))
        for least, other, name in (
            (LEAST_OF_LIMIT, limit_of(records, size), "the limit with images on the device"),
            (LEAST_OF_TORCHVISION, torchvision, "the job with torchvision's loader"),
        ):
            value = _ratio(by_key.get((CACHED, size)), other)
            is_met = None if value is None else value >= least
            words = f"the job with the cache at least {least:g} times as fast as {name}"
            found.append({"target": f"batch {size}, {words}", "value": value, "met": is_met})
    return found


def limit_of(records: Records, batch_size: int) -> dict[str, Any] | None:
    """Return the limit of what a job does: train in bf16 and channels_last, not compiled."""
    ways = {_way(r): r for r in records if r["kind"] == "limit" and r["batch_size"] == batch_size}
    return ways.get(("train", "bf16", True, False))


def _way(record: dict[str, Any]) -> tuple[str, str, bool, bool]:
    is_compiled = record.get("compiled", False)
    return record["mode"], record["precision"], record["channels_last"], is_compiled


def _order(record: dict[str, Any]) -> tuple:
    mode, precision, channels_last, compiled = _way(record)
    return mode == "predict", precision, not channels_last, compiled


def _cell(record: dict[str, Any]) -> str:
    if "rates" in record:
        return spread(record["rates"], 0)
    return "failed" if "error" in record else "not reached" if "not_reached" in record else "–"


def _ratio(one: dict[str, Any] | None, other: dict[str, Any] | None) -> float | None:
    if one is None or other is None or "rates" not in one or "rates" not in other:
        return None
    return statistics.median(one["rates"]) / statistics.median(other["rates"])
