"""What `benchmarks.scaling` recorded, the model and its predictions as tables in docs/parallelism.md."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.documents import chart, markdown
from benchmarks.scaling import communication_volume as sent
from benchmarks.scaling.model import (
    MACHINES,
    Link,
    Machine,
    all_reduce_bytes,
    link_of,
    messages_and_bytes,
    step_seconds,
    untrained,
    work_of,
)
from benchmarks.scaling.steps import COUNTS, Case, Transport
from finetune.models.stages import head_name
from finetune.parity.branches import Siamese
from finetune.parity.pipeline import layers, partition

Cases = Sequence[Case | Transport]
Records = Mapping[str, dict]

BATCHES = (256, 2_048)  # of the prediction

_GREY = "#6b7280"
_LINES = ("#c2410c", "#ca8a04", "#1d4ed8", "#047857")


def median(record: dict, setting: str) -> float:
    return statistics.median(record["seconds"][setting])


def quartiles(record: dict, setting: str) -> tuple[float, float]:
    values = statistics.quantiles(record["seconds"][setting], n=4, method="inclusive")
    return values[0], values[2]


def milliseconds(record: dict, setting: str) -> str:
    """Return `median (lower to upper quartile)`."""
    return f"{short(median(record, setting))} ({' to '.join(short(value) for value in quartiles(record, setting))})"


def short(seconds: float) -> str:
    """Return milliseconds to three digits."""
    value = 1000 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def links(case: Transport, record: dict) -> dict[int, Link]:
    """Return latency and bandwidth among 2 and 4 processes."""
    return {
        k: link_of({size: median(record, f"{k} {size}") for size in case.sizes}, k)
        for k in COUNTS
        if k > 1
    }


def modelled(case: Case, record: dict, k: int, link: Link) -> float:
    """Return the seconds that the model makes of processes that exchange nothing, and of the transport."""
    return step_seconds(case, work_of(case, medians(record), k), k, record["cores"], link)


def medians(record: dict) -> dict[str, float]:
    return {setting: statistics.median(values) for setting, values in record["seconds"].items()}


def tables(cases: Cases, records: Records) -> dict[str, str]:
    """Return the Markdown blocks of docs/parallelism.md."""
    transport = next(case for case in cases if isinstance(case, Transport))
    steps = [case for case in cases if isinstance(case, Case)]
    by_k = links(transport, records[transport.name])
    return {
        "traffic": traffic_table(),
        "transport": transport_table(transport, records[transport.name], by_k),
        "scaling": scaling_table(steps, records),
        "model": model_table(steps, records, by_k),
        "prediction": prediction_table(),
    }


def transport_table(case: Transport, record: dict, by_k: Mapping[int, Link]) -> str:
    head = ["bytes"]
    for k in by_k:
        head += [f"{k} processes: ms", "formula", "error"]
    rows = []
    for size in case.sizes:
        row = [f"{size:,}"]
        for k, link in by_k.items():
            made = link.latency + all_reduce_bytes(size, k) / link.bandwidth
            row += [
                milliseconds(record, f"{k} {size}"),
                short(made),
                percent(made, median(record, f"{k} {size}")),
            ]
        rows.append(row)
    found = "; ".join(
        f"{k} processes: latency {1e6 * link.latency:.0f} µs, {link.bandwidth / 1e9:.2f} GB/s sent by each"
        for k, link in by_k.items()
    )
    return f"{markdown(head, rows)}\n\n{found}."


def percent(made: float, true: float) -> str:
    return f"{100 * (made / true - 1):+.0f} %"


def scaling_table(cases: Sequence[Case], records: Records) -> str:
    head = [
        "a step of",
        "1 process: ms",
        "2 processes: ms",
        "speed-up",
        "4 on 2 cores: ms",
        "speed-up",
    ]
    rows = []
    for case in cases:
        record, row = records[case.name], [case.name, milliseconds(records[case.name], "1")]
        for k in ("2", "4"):
            row += [milliseconds(record, k), f"{median(record, '1') / median(record, k):.2f}"]
        rows.append(row)
    num = {len(values) for record in records.values() for values in record["seconds"].values()}
    machine, torch_version = ({r[name] for r in records.values()} for name in ("machine", "torch"))
    under = f"Median (lower to upper quartile) of n = {', '.join(map(str, sorted(num)))} rounds; "
    return (
        f"{markdown(head, rows)}\n\n{under}{'; '.join(machine)}, torch {', '.join(torch_version)}."
    )


def model_table(cases: Sequence[Case], records: Records, by_k: Mapping[int, Link]) -> str:
    head = ["a step of", "shared: ms", "repeated: ms", "contention", "messages", "MB sent"]
    for k in by_k:
        head += [f"{k}: model, ms", "measured", "error"]
    rows = []
    for case in cases:
        record = records[case.name]
        work = work_of(case, medians(record), 2)
        messages, num_bytes = messages_and_bytes(case, 2)
        row = [case.name, short(work.shared), short(work.repeated), f"{work.contention:.2f}"]
        row += [str(messages), f"{num_bytes / 1e6:.2f}"]
        for k, link in by_k.items():
            made, true = modelled(case, record, k, link), median(record, str(k))
            row += [short(made), short(true), percent(made, true)]
        rows.append(row)
    return markdown(head, rows)


def prediction_table() -> str:
    network = untrained("resnet18", 1000)
    head = ["GPUs", "network"]
    for batch_size in BATCHES:
        head += [f"batch {batch_size:,}: ms", "efficiency", "with shared statistics"]
    rows = []
    a100, h100 = MACHINES[:3], MACHINES[3:]
    one_machine = ((1, a100[:1]), (2, a100[:1]), (4, a100[:1]), (8, (a100[0], *h100)))
    for k, machines in (*one_machine, (16, a100[2:]), (32, a100[2:]), (64, MACHINES)):
        for machine in machines:
            row = [
                str(k),
                machine.name
                if k > 8
                else machine.name.split(",")[0] + (", NVLink" if k > 1 else ""),
            ]
            for batch_size in BATCHES:
                row += predicted(machine, network, k, batch_size)
            rows.append(row)
    return markdown(head, rows)


def predicted(machine: Machine, network: torch.nn.Module, k: int, batch_size: int) -> list[str]:
    """Return milliseconds of a step, efficiency from no overlap to all of it, and the same with shared statistics."""
    mark = "†" if batch_size // k < 32 else ""
    found = [f"{short(machine.step(network, k, batch_size, 'frozen'))}{mark}"]
    for batch_norm in ("frozen", "shared"):
        low, high = (
            100 * machine.efficiency(network, k, batch_size, batch_norm, overlap)
            for overlap in (False, True)
        )
        found.append(
            f"{low:.0f} to {high:.0f} %{mark}"
            if round(low) < round(high)
            else f"{high:.0f} %{mark}"
        )
    return found


def traffic_table() -> str:
    """Return the bytes that the device sends that sends most, for ResNet-18 at 224 pixels, batch 256, 1,000 classes."""
    network = untrained("resnet18", 1000)
    large = untrained("resnet18", 100_000)
    x = torch.empty(256, 3, 224, 224, device="meta")
    # name: most devices, bytes that each of k sends
    ways: dict[str, tuple[int, Callable[[int], Sequence[float]]]] = {
        "by hand": (8, lambda k: sent.by_hand_bytes(network, k)),
        "ddp": (8, lambda k: sent.data_parallel_bytes(network, k)),
        "pipeline": (4, lambda k: sent.pipeline_bytes(partition(layers(network), k), x)),
        "layer-wise head": (8, lambda k: head_bytes(network, k)),
        "ddp, 100,000 classes": (8, lambda k: sent.data_parallel_bytes(large, k)),
        "layer-wise head, 100,000 classes": (8, lambda k: head_bytes(large, k)),
        "branches (Keras's LSTM)": (2, lambda k: sent.branches_bytes(Siamese(), 256)),
    }
    rows = [
        [name, *(f"{max(found(k)) / 1e6:.1f}" if k <= most else "–" for k in (2, 4, 8))]
        for name, (most, found) in ways.items()
    ]
    return markdown(["MB sent in a step", "2 devices", "4", "8"], rows)


def head_bytes(network: torch.nn.Module, k: int) -> Sequence[float]:
    return sent.linear_bytes(network, [head_name(network)], 256, k)


def draw(cases: Cases, records: Records, path: Path) -> None:
    """Draw a row for each case (dots: every round; line: median; ring: model), and efficiency by number of GPUs."""
    with chart(path, (9.5, 4.8), dpi=110, ncols=2) as (_, (left, right)):
        draw_speed_ups(left, cases, records)
        draw_efficiency(right)
        left.grid(alpha=0.25)
        right.grid(alpha=0.25)


def draw_speed_ups(axes: Any, cases: Cases, records: Records) -> None:
    """Draw measured and modelled speed-ups."""
    transport = next(case for case in cases if isinstance(case, Transport))
    by_k = links(transport, records[transport.name])
    steps = [case for case in cases if isinstance(case, Case)]
    for row, case in enumerate(steps):
        record = records[case.name]
        one = median(record, "1")
        for k, colour, shift in ((2, _LINES[2], -0.17), (4, _LINES[0], 0.17)):
            y = row + shift
            speeds = [one / seconds for seconds in record["seconds"][str(k)]]
            ring = one / modelled(case, record, k, by_k[k])
            axes.plot(speeds, [y] * len(speeds), "o", ms=4, alpha=0.5, color=colour)
            axes.plot([one / median(record, str(k))] * 2, [y - 0.15, y + 0.15], lw=2, color=colour)
            axes.plot(ring, y, "o", ms=9, mfc="none", mec=colour)
    for colour, name in ((_LINES[2], "2 processes"), (_LINES[0], "4 on 2 cores")):
        axes.plot([], [], "o-", ms=4, color=colour, label=name)
    axes.plot([], [], "o", ms=9, mfc="none", mec=_GREY, label="model")
    axes.axvline(1, color=_GREY, lw=1, ls="--")
    axes.set_yticks(range(len(steps)), [case.name for case in steps])
    axes.set(xlim=(0, 2.05), title="Measured on 2 cores")
    axes.set_xlabel("speed-up over one process, same batch")
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.3, -0.14), ncols=3, frameon=False, fontsize=9)


def draw_efficiency(axes: Any) -> None:
    """Draw the predicted efficiency of GPUs, from no overlap to all of it."""
    network = untrained("resnet18", 1000)
    counts = (1, 2, 4, 8, 16, 32, 64)
    for machine, colour in zip(MACHINES, _LINES, strict=True):
        low, high = (
            [100 * machine.efficiency(network, k, BATCHES[1], "frozen", overlap) for k in counts]
            for overlap in (False, True)
        )
        axes.fill_between(counts, low, high, color=colour, alpha=0.15, lw=0)
        axes.plot(counts, high, "-", color=colour, label=machine.name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(k) for k in counts])
    axes.set(ylim=(0, 104), ylabel="efficiency, %", title="Predicted, not measured")
    axes.set_xlabel(f"GPUs, 8 in a machine; batch of {BATCHES[1]:,}")
    title = "upper edge: buckets overlap"
    axes.legend(loc="lower left", frameon=False, fontsize=8.5, title=title, alignment="left")
