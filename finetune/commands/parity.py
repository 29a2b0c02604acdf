"""`finetune parity`: compare every way of using several devices with the same training on one device."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from finetune.distributed.launch import check_num_processes
from finetune.parity import many_processes, one_process
from finetune.parity.one_process import Trained, distance
from finetune.settings.all_commands import ParitySettings

# Rounding depends on the order of sums, and its error grows with the steps: 1e-16 per sum in float64, 1e-7 in float32.
# Any mistake (a missing gradient, a mean instead of a sum) is above 1e-4 after ten steps: see the tests' controls.
TOLERANCES = {"float64": 1e-10, "float32": 2e-6}
_IMAGES_PER_DEVICE = 16


@dataclass
class Row:
    """A way of training, compared with one device, or the reason why it was skipped."""

    name: str
    network: str
    devices: int
    difference: float | None = None  # the largest of any weight on any device
    moved: float = 0.0  # the largest change of any weight since the start
    seconds: float = 0.0
    skipped: str = ""


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute with one thread within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def parity(options: ParitySettings) -> None:
    """Train the same networks on the same images in every way that uses several devices, and compare the weights.

    Takes a minute or two on two cores. Uses CUDA devices if there are enough, or else processes and replicas on the
    CPU, each with one thread. Exits with 1 if a way differs from one device by more than its tolerance.
    """
    has_gpus = torch.cuda.device_count() >= options.devices
    check_num_processes(options.devices, "cuda" if has_gpus else "cpu", "devices")
    with (
        _one_thread(),
        tempfile.TemporaryDirectory(prefix="finetune-parity-") as folder,
        Console(stderr=True).status("") as status,
    ):
        rows = compare(Path(folder), options.devices, options.steps, options.dtype, status.update)
    tolerance = TOLERANCES[options.dtype]
    print_table(rows, options.dtype, tolerance, options.steps)
    wrong = [
        row.name for row in rows if row.difference is not None and not row.difference <= tolerance
    ]
    if wrong:
        raise ValueError(f"not what one device computes: {', '.join(wrong)}")


def compare(
    folder: Path,
    k: int,
    steps: int,
    dtype: str,
    report_status: Callable[[str], None] = lambda name: None,
) -> list[Row]:
    """Train in every way and return a row for each.

    Args:
        folder: All files are written here.
        k: Number of devices.
        steps: Number of training steps.
        dtype: Of weights and arithmetic.
        report_status: Called with the name of each way before it starts.
    """
    report_status("one device")
    is_cuda = torch.cuda.device_count() >= k
    devices = [torch.device("cuda", i) if is_cuda else torch.device("cpu") for i in range(k)]
    batch_size = k * _IMAGES_PER_DEVICE
    job = one_process.Job(
        folder=folder, k=k, steps=steps, dtype=dtype, is_cuda=is_cuda, batch_size=batch_size
    )
    one_process.disable_tf32()
    batches = one_process.draw_batches(job)
    starts = {name: one_process.initial_network(name, job) for name in ("lenet", "small_cnn")}
    single = {
        name: one_process.on_one_device(network, batches, devices[0])
        for name, network in starts.items()
    }

    def row(name: str, network: str, trained: Trained, num_devices: int = k) -> Row:
        reference = single[network].states[0]
        return Row(
            name,
            network,
            num_devices,
            difference=max(distance(state, reference) for state in trained.states),
            moved=distance(reference, starts[network].state_dict()),
            seconds=trained.seconds,
        )

    lenet = starts["lenet"]
    report_status("by hand")
    rows = [row("one device", "lenet", single["lenet"], 1)]
    rows.append(row("by hand", "lenet", one_process.by_hand(lenet, batches, devices)))
    for name, network in (("ddp", "lenet"), ("ddp batch norm", "small_cnn")):
        report_status(f"finetune fit with {name}")
        rows.append(row(name, network, many_processes.by_lightning(network, job)))
    report_status("pipelines and layers on several devices")
    for name, split in many_processes.splits(lenet, batches, job).items():
        if isinstance(split, str):
            rows.append(Row(name, "lenet", k, skipped=split))
        else:
            rows.append(row(name, "lenet", split))
    report_status("branches")
    siamese, single["lstm"], trained = one_process.branches(job)
    starts["lstm"] = siamese
    rows.append(row("branches", "lstm", trained, 2))
    return rows


def print_table(rows: Sequence[Row], dtype: str, tolerance: float, steps: int) -> None:
    """Print a row for each way of training, and what the columns mean."""
    columns = ("way", "network", "devices", "difference", "moved", "ms")
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False)
    for i, column in enumerate(table.columns):
        column.no_wrap = True
        column.justify = "left" if i < 2 else "right"
    for row in rows:
        if row.difference is None:
            table.add_row(row.name, row.network, str(row.devices), "skipped")
            continue
        difference = "–" if row.name == "one device" else f"{row.difference:.1e}"
        moved = f"{row.moved:.2g}"
        ms = f"{1000 * row.seconds:.1f}"
        table.add_row(row.name, row.network, str(row.devices), difference, moved, ms)
    Console().print(table)
    for row in rows:
        if row.skipped:
            print(f"{row.name} was skipped: {row.skipped}")
    print(
        f"{steps} steps in {dtype}. difference: the largest between a weight on any device and that of one device.\n"
        f"At most {tolerance:g} is rounding, by sums in another order. moved: the largest change of any weight.\n"
        "ms: median of a step."
    )
