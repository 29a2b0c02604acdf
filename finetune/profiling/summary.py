"""The result of a benchmark as text, and the comparison of numbers of devices."""

import statistics
from collections.abc import Sequence
from typing import Any


def text(result: dict[str, Any]) -> str:
    """Return a result of `Recorder.result` as text: medians, with the smallest and largest measurement."""
    is_cpu = result["device_type"] == "cpu"
    cores = f" ({result['cores']} cores)" if is_cpu else ""
    workers = f"{result['num_workers']} worker" + "s" * (result["num_workers"] != 1)
    rates = [result["batch_size"] / seconds for seconds in result["seconds"]]
    waited = [100 * share for share in result["waited"]]
    lines = [
        f"{result['num_devices']} × {result['device']}{cores}",
        f"{result['precision']}, batch {result['batch_size']} at {result['image_size']} pixels, {workers}",
        f"{_median(rates, '.0f')} images/s, n = {len(rates)}",
        f"waiting for data: {_median(waited, '.1f')} % of the time",
    ]
    for row in result.get("scaling", []):
        devices = f"{row['devices']} device{'s' * (row['devices'] > 1)}"
        lines.append(
            f"{devices}: {row['rate']:,.0f} images/s, {row['speed_up']:.2f} times 1, efficiency "
            f"{100 * row['efficiency']:.0f} %" + (" of the shared cores" if is_cpu else "")
        )
    return "\n".join(lines)


def scaling(results: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Return rate, speed-up and efficiency for each number of devices, relative to the first result.

    Processes on a CPU share its cores. There an efficiency of 1 means as fast as the first result.
    """
    rates = [result["batch_size"] / statistics.median(result["seconds"]) for result in results]
    base = rates[0] / results[0]["num_devices"]
    rows = []
    for rate, result in zip(rates, results, strict=True):
        num = result["num_devices"]
        ideal = rates[0] if result["device_type"] == "cpu" else base * num
        rows.append(
            {"devices": num, "rate": rate, "speed_up": rate / base, "efficiency": rate / ideal}
        )
    return rows


def _median(values: Sequence[float], form: str) -> str:
    least = min(values)
    most = max(values)
    return f"{statistics.median(values):,{form}} ({least:,{form}} to {most:,{form}})"
