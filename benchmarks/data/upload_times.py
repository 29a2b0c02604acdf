"""Measure how long the uploads of checkpoints to object storage hold training up, next to runs on the disk.

    python -m benchmarks.data.upload_times

A ResNet-18 at 64 pixels is trained for three epochs on the 811 images of `storage_rates`, from the disk. Each epoch
ends with a checkpoint. Each round takes its cases in a random order: `--out` on the disk, on a server with 20 ms of
latency, and on one that also receives 10 MB/s. The results go to benchmarks/data/upload_times.json and into
benchmarks/NOTEBOOK.md. Stop at any time, and start again to continue.
"""

import csv
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.documents import ROOT, markdown, publish, spread
from benchmarks.common.driver import Benchmark
from benchmarks.common.records import where_and_when
from benchmarks.data.storage_rates import Server, measure_on_server

_ROUNDS = 5
_LATENCY = 20  # ms
# Rates of the link in MB/s; 0 is no limit.
_RATES = {"disk": 0, "20 ms": 0, "20 ms, 10 MB/s": 10}
_OPTIONS = (
    "--model.weights null --trainer.accelerator cpu --trainer.precision 32-true --report false --test_after_fit false "
    "--model.backbone resnet18 --data.image_size 64 --trainer.max_epochs 3 --name run"
)


class Run(NamedTuple):
    """What identifies a record."""

    place: str
    round: int


def plan(records: Sequence[dict]) -> Iterator[Run]:
    for number in range(_ROUNDS):
        places = list(_RATES)
        random.Random(number).shuffle(places)
        for place in places:
            yield Run(place, number)


def measure(run: Run, images: Path, server: Server) -> dict:
    """Fit in an empty folder; return the seconds of the command, and of each epoch with its checkpoint."""
    server.set_latency(_LATENCY, _RATES[run.place])
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **server.environment}
        environment |= {"FINETUNE_CACHE": str(Path(folder, "cache")), "OMP_NUM_THREADS": "1"}
        out = str(Path(folder, "runs"))
        files = Path(out)
        if run.place != "disk":
            out = f"s3://photos/{run.round}-{_RATES[run.place]}"
            files = Path(folder, "cache/runs-in-storage", out.replace("://", "/"))
        command = [sys.executable, "-m", "finetune", "fit", str(images), *_OPTIONS.split()]
        command += ["--out", out]
        began = time.perf_counter()
        subprocess.run(command, cwd=folder, env=environment, check=True)
        seconds = time.perf_counter() - began
        path = files / "fit/run"
        with (path / "metrics.csv").open() as file:
            epochs = [float(row["seconds"]) for row in csv.DictReader(file)]
        size = sum(file.stat().st_size for file in (path / "checkpoints").iterdir())
    return {"seconds": seconds, "epochs": epochs, "checkpoints": size, **where_and_when()}


def table(records: Sequence[dict]) -> str:
    """Return the seconds of each case, and those beyond the run on the disk in the same round."""
    rows = []
    on_disk = {r["round"]: r["seconds"] for r in records if r["place"] == "disk"}
    for place in _RATES:
        seconds = {r["round"]: r["seconds"] for r in records if r["place"] == place}
        both = seconds.keys() & on_disk.keys()
        if not both:
            continue
        more = spread([seconds[i] - on_disk[i] for i in both], 1)
        rows.append([place, spread([seconds[i] for i in both], 1), more, str(len(both))])
    return markdown(["--out", "command, s", "longer than on the disk, s", "n"], rows)


def main() -> None:
    benchmark = Benchmark(
        ROOT / "benchmarks/data/upload_times.json",
        Run,
        plan,
        lambda records: publish({"upload_times": table(records)}),
        named=("place",),
    )
    measure_on_server(benchmark, measure, __doc__)


if __name__ == "__main__":
    main()
