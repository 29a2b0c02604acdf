"""The result of a benchmark as text: where the time of a step goes, and advice."""

import statistics
from collections.abc import Sequence
from typing import Any

_ROWS = {
    "decode": "decode: one core, from the files",
    "cache": "the same from cached images",
    "augment": "augment: one core",
    "load": "load: as in the run, alone",
    "transfer": "transfer to the device",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "whole": "whole",
}
_CACHED = {"pictures": "decoded images cached", "nothing": "nothing cached"}
_WAITS = 0.1  # if training waits for a larger share of the time, reading data is the bottleneck


def text(result: dict[str, Any]) -> str:
    """Return a result of `Recorder.result` as text."""
    about = result["about"]
    seconds = result["seconds"]
    size = about["batch_size"]
    num = about["num_devices"]
    cores = f" ({about['cores']} cores)" if about["device_type"] == "cpu" else ""
    workers = f"{about['num_workers']} worker" + "s" * (about["num_workers"] != 1)
    lines = [
        f"{num} × {about['device']}{cores}",
        f"{about['precision']}, batch {size} at {about['image_size']} pixels, {workers}, {_CACHED[about['cache']]}"
        + (", compiled" if about["compiled"] else ""),
        "",
        f"{'a batch':34}{'ms: median (smallest to largest), n':>38}{'images/s':>14}",
    ]
    for name, title in _ROWS.items():
        if values := seconds.get(name):
            spread = f"{_ms(statistics.median(values))} ({_ms(min(values))} to {_ms(max(values))}), {len(values)}"
            lines.append(f"{title:34}{spread:>38}{_rate(size, values):>14,.0f}")
    waited = [100 * share for share in result["waited"]]
    lines += ["", f"waiting for data: {_percent(waited)} of the time"]
    lines += result.get("advice", [])
    for row in result.get("scaling", []):
        devices = f"{row['devices']} device{'s' * (row['devices'] > 1)}"
        lines.append(
            f"{devices}: {row['rate']:,.0f} images/s, {row['speed_up']:.2f} times 1, efficiency "
            f"{100 * row['efficiency']:.0f} %"
            + (" of the shared cores" if about["device_type"] == "cpu" else "")
        )
    return "\n".join(lines)


def advice(result: dict[str, Any]) -> list[str]:
    """Return lines that name the bottleneck and what would help; none if the parts were not measured."""
    about = result["about"]
    seconds = {name: statistics.median(v) for name, v in result["seconds"].items() if v}
    if "forward" not in seconds:
        return []
    if statistics.median(result["waited"]) > _WAITS:
        lines = ["bottleneck: reading images"]
        free = about["cores"] - about["num_workers"] - (about["device_type"] == "cpu")
        if about["cache"] == "nothing" and seconds.get("decode", 0) > seconds.get("augment", 0):
            share = seconds["decode"] / (seconds["decode"] + seconds["augment"])
            lines.append(
                f"would help: a cache (--data.cache_limit_gb), since decoding is {100 * share:.0f} % of it"
            )
        if free > 0:
            lines.append(
                f"would help: --data.num_workers {about['num_workers'] + free}, as many as cores are free"
            )
        if len(lines) == 1:
            lines.append("would help: more cores, a smaller --data.image_size, fewer augmentations")
        return lines
    part = max(("forward", "backward", "optimizer"), key=seconds.__getitem__)
    lines = [
        f"bottleneck: the network, its {part} most, {100 * seconds[part] / seconds['whole']:.0f} % of a step"
    ]
    total = seconds["forward"] + seconds["backward"] + seconds["optimizer"]
    for precision, other in result["other"].items():
        if total / other > 1.1:
            lines.append(
                f"would help: --trainer.precision {precision}, measured {total / other:.1f} times as fast"
            )
    if not about["compiled"] and about["device_type"] == "cuda":
        lines.append("may help: --model.compile true; add it to this command to measure it")
    if len(lines) == 1:
        lines.append("would help: a smaller --data.image_size, or --model.freeze")
    return lines


def scaling(results: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Return rate, speed-up and efficiency for each number of devices, relative to the first result.

    Processes on a CPU share its cores. There an efficiency of 1 means as fast as the first result.
    """
    rates = [_rate(r["about"]["batch_size"], r["seconds"]["whole"]) for r in results]
    base = rates[0] / results[0]["about"]["num_devices"]
    rows = []
    for rate, result in zip(rates, results, strict=True):
        num = result["about"]["num_devices"]
        ideal = rates[0] if result["about"]["device_type"] == "cpu" else base * num
        rows.append(
            {"devices": num, "rate": rate, "speed_up": rate / base, "efficiency": rate / ideal}
        )
    return rows


def _rate(batch_size: int, seconds: Sequence[float]) -> float:
    return batch_size / statistics.median(seconds)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"


def _percent(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} % ({min(values):.1f} to {max(values):.1f})"
