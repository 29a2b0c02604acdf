"""Measure how much other programs slow down a fit and a plain PyTorch loop.

    python -m benchmarks.peers.busy_machine --data FOLDER

FOLDER has train/CLASS and val/CLASS. A complete command trains a ResNet-18 from random weights for one epoch: 224
pixels, bf16, batches of 64, two workers, and as many threads as cores. Next to it there is either nothing, or two
endless loops a core. Each round takes its cases in turn. Two more cases have threads that wait longer for each other
before they sleep, or not at all. Nothing else may use the machine. The results go to benchmarks/peers/busy_machine.json
and into benchmarks/NOTEBOOK.md. Stop at any time, and start again to continue.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.common.documents import ROOT, markdown, publish, spread
from benchmarks.common.driver import Benchmark
from benchmarks.common.records import where_and_when
from finetune.system.machine import num_cores

_FIT = "`finetune fit`"
_LONG = "`finetune fit`, long waits"
_NONE = "`finetune fit`, no waits"
_PLAIN = "plain PyTorch loop"
_CASES = (_FIT, _LONG, _NONE, _PLAIN)
_ENVIRONMENTS = {
    _LONG: {"GOMP_SPINCOUNT": "300000"},  # the default of GNU's OpenMP
    _NONE: {"OMP_WAIT_POLICY": "PASSIVE"},
}
_NUM_ROUNDS = 4
_LOOPS_PER_CORE = 2
# The peer's network has torchvision's weights. Random ones take the same time, and no download.
_PLAIN_LOOP = """
import runpy, sys, torchvision.models as models
resnet18 = models.resnet18
models.resnet18 = lambda weights: resnet18()
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Run(NamedTuple):
    """What identifies a record."""

    case: str
    is_busy: bool
    round: int


def plan(records: Sequence[dict]) -> Iterator[Run]:
    for number in range(_NUM_ROUNDS):
        for is_busy in (True, False):
            for case in _CASES if number % 2 == 0 else reversed(_CASES):
                yield Run(case, is_busy, number)


def command(case: str, data: Path, out: str) -> list[str]:
    """Return the command of a case."""
    if case == _PLAIN:
        peers = ROOT / "benchmarks/peers"
        start = f"import sys; sys.path.insert(0, {str(peers)!r}); sys.argv[0] = {str(peers / 'plain_peer.py')!r}"
        line = [sys.executable, "-c", start + _PLAIN_LOOP, "--data", str(data), "--out", out]
        return [*line, "--epochs", "1", "--image_size", "224", "--best"]
    line = [sys.executable, "-m", "finetune", "fit", str(data), "--weights", "null", "--out", out]
    line += ["--epochs", "1", "--size", "224", "--batch", "64", "--workers", "2"]
    return [*line, "--precision", "bf16-mixed", "--report", "false", "--test_after_fit", "false"]


def _loop_forever() -> None:
    while True:
        pass


@contextmanager
def other_programs(number: int) -> Iterator[None]:
    """Run endless loops in processes of their own."""
    programs = [multiprocessing.Process(target=_loop_forever, daemon=True) for _ in range(number)]
    try:
        for program in programs:
            program.start()
        yield
    finally:
        for program in programs:
            program.kill()


def measure(run: Run, data: Path) -> dict:
    """Return the seconds of a command."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= _ENVIRONMENTS.get(run.case, {})
    num_loops = _LOOPS_PER_CORE * num_cores() if run.is_busy else 0
    with tempfile.TemporaryDirectory() as out, other_programs(num_loops):
        began = time.perf_counter()
        subprocess.run(
            command(run.case, data, out), check=True, env=environment, stdout=subprocess.DEVNULL
        )
        seconds = time.perf_counter() - began
    return {"seconds": round(seconds, 1), **where_and_when()}


def table(records: Sequence[dict]) -> str:
    """Return the seconds of each case, alone and next to other programs, and how many times more that is."""
    rows = []
    for case in _CASES:
        alone, busy = (
            [r["seconds"] for r in records if r["case"] == case and r["is_busy"] == is_busy]
            for is_busy in (False, True)
        )
        if alone and busy:
            times = f"{median(busy) / median(alone):.1f}"
            rows.append([case, spread(alone, 1), spread(busy, 1), times, str(len(busy))])
    return markdown(["command", "seconds alone", "next to loops", "times", "n"], rows)


def main() -> None:
    benchmark = Benchmark(
        ROOT / "benchmarks/peers/busy_machine.json",
        Run,
        plan,
        lambda records: publish({"busy_machine": table(records)}),
        named=("case",),
    )
    parser = benchmark.parser(__doc__)
    parser.add_argument("--data", type=Path, help="folder with train/CLASS and val/CLASS")
    args = parser.parse_args()
    benchmark.main(args, lambda run: measure(run, args.data))


if __name__ == "__main__":
    main()
