"""What `benchmarks.scaling` recorded, the model and its predictions as tables in docs/parallelism.md."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torchvision import models

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
from finetune.parity import communication_volume
from finetune.parity.branches import Siamese
from finetune.parity.pipeline import layers, partition

Cases = Sequence[Case | Transport]
Records = Mapping[str, dict]

BATCHES = (256, 2_048)  # of the prediction
PCIE = 15.75e9  # bytes per second of PCIe 3.0 x16: 8 GT/s, 128 of 130 bits, 16 lanes


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


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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
        "claims": claims_table(),
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
    network, x = untrained("resnet18", 1000), torch.empty(256, 3, 224, 224, device="meta")
    large, siamese = untrained("resnet18", 100_000), Siamese()
    rows = []
    for name, found in (
        ("by hand", lambda k: communication_volume.by_hand_bytes(network, k)),
        ("ddp", lambda k: communication_volume.data_parallel_bytes(network, k)),
        (
            "pipeline",
            lambda k: communication_volume.pipeline_bytes(partition(layers(network), k), x),
        ),
        (
            "layer-wise head",
            lambda k: communication_volume.linear_bytes(network, [head_name(network)], 256, k),
        ),
        ("ddp, 100,000 classes", lambda k: communication_volume.data_parallel_bytes(large, k)),
        (
            "layer-wise head, 100,000 classes",
            lambda k: communication_volume.linear_bytes(large, [head_name(large)], 256, k),
        ),
        ("branches (Keras's LSTM)", lambda k: communication_volume.branches_bytes(siamese, 256)),
    ):
        cells = []
        for k in (2, 4, 8):
            is_possible = k <= {"pipeline": 4, "branches (Keras's LSTM)": 2}.get(name, 8)
            cells.append(f"{max(found(k)) / 1e6:.1f}" if is_possible else "–")
        rows.append([name, *cells])
    return markdown(["MB sent in a step", "2 devices", "4", "8"], rows)


def claims_table() -> str:
    """Return what the model says of the texts' figures."""
    resnet = untrained("resnet18", 1000)
    lenet = untrained("lenet", 10)
    small = untrained("resnet18_small", 10)
    machine, k = MACHINES[0], 8
    ring = k * machine.efficiency(resnet, k, 256, "frozen")
    share = 256 / k / machine.pictures
    # gradients in, weights out
    through_one = 2 * communication_volume.by_hand_bytes(resnet, k)[0] / PCIE
    own_links = 2 * gradient_bytes(resnet) / PCIE
    keras = (
        f"ResNet-18, 32 pictures on each A100: {ring:.1f} of 8 with ddp over NVLink. In its own form, weights out "
        f"and gradients back over PCIe 3.0, {k * share / (share + own_links):.1f} of 8 where each GPU has a link to "
        f"itself, {k * share / (share + through_one):.1f} where one device serves all. 90 % need a share that computes "
        f"for {short(9 * own_links)} ms: GPUs of {32 / (9 * own_links):.0f} pictures a second, or slower."
    )
    num_steps = 60_000 / 256
    # Backward takes twice as many multiplications as forward, and each comes with an addition.
    flops = 3 * 2 * lenet_multiplications() * 60_000
    book_lenet = (
        f"{short(2.7 / num_steps)} ms a step become {short(3.6 / num_steps)}. Gradients in and out over PCIe 3.0 are "
        f"{short(2 * gradient_bytes(lenet) / PCIE)} ms of it. What can be shared out is {flops / 1e12:.1f} TFLOP an "
        f"epoch: {flops / 5e12:.2f} s at 5 TFLOP a second, of which two GPUs save half. All else is `repeated`, and "
        "one process that launches the kernels of both GPUs does it twice."
    )
    one, two = 12.2 / num_steps, 7.4 / (num_steps / 2)
    made = one + 2 * gradient_bytes(small) / PCIE
    book_resnet = (
        f"{short(one)} ms a step become {short(two)}, at 256 pictures a GPU in both. With weights out and gradients "
        f"back over PCIe 3.0: {short(made)} ms, {2 * one / made:.2f} times as fast; theirs is {2 * one / two:.2f}. Of "
        "the accuracy a model of time says nothing: see below."
    )
    resnet50 = replace(machine, pictures=2470)
    with torch.device("meta"):
        best, worst = (
            k * resnet50.efficiency(models.resnet50(), k, 8 * 256, "frozen", o)
            for o in (True, False)
        )
    nvidia = f"{worst:.2f} to {best:.2f} of 8: reading pictures and waiting for the slowest are not in the model."
    rows = [
        ["Keras, `multi_gpu_model`: quasi-linear on up to 8 GPUs", keras],
        ["the book, LeNet by hand: 2.7 s an epoch on 1 GPU, 3.6 s on 2", book_lenet],
        [
            "the book, ResNet-18: 12.2 s an epoch on 1 GPU, 7.4 s on 2 (.93 becomes .67)",
            book_resnet,
        ],
        ["NVIDIA, ResNet-50 on 8 A100: 6.72 of 8 in mixed precision, 7.72 in TF32", nvidia],
    ]
    return markdown(["claim", "what the model says"], rows)


def gradient_bytes(network: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in network.parameters())


def lenet_multiplications() -> int:
    """Return the multiplications of LeNet's forward pass on one picture; backward takes twice as many."""
    return 26 * 26 * 9 * 20 + 9 * 9 * 25 * 20 * 50 + 800 * 128 + 128 * 10
