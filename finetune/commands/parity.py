"""`finetune parity`: compare every way of using several devices with the same training on one device."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from finetune.distributed.launch import check_num_processes
from finetune.parity.ways import Job, Row, compare
from finetune.settings.all_commands import ParitySettings

# Rounding depends on the order of sums, and its error grows with the steps: 1e-16 per sum in float64, 1e-7 in float32.
# Any mistake (a missing gradient, a mean instead of a sum) is above 1e-4 after ten steps: see the tests' controls.
TOLERANCES = {"float64": 1e-10, "float32": 2e-6}


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
        dtype = getattr(torch, options.dtype)
        job = Job(Path(folder), options.devices, options.steps, dtype, has_gpus)
        rows = [*compare(job, status.update)]
    tolerance = TOLERANCES[options.dtype]
    print_table(rows, options.dtype, tolerance, options.steps)
    wrong = [row.name for row in rows if not row.difference <= tolerance]
    if wrong:
        raise ValueError(f"not what one device computes: {', '.join(wrong)}")


def print_table(rows: Sequence[Row], dtype: str, tolerance: float, steps: int) -> None:
    """Print a row for each way of training, and what the columns mean."""
    columns = ("way", "network", "devices", "difference", "moved", "ms")
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False)
    for i, column in enumerate(table.columns):
        column.no_wrap = True
        column.justify = "left" if i < 2 else "right"
    for row in rows:
        if row.skipped:
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
