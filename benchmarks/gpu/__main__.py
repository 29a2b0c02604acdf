"""How fast ResNet-18 trains on one GPU: the limit with pictures on the device, loading alone, the whole job.

    python -m benchmarks.gpu --root FOLDER [--weights resnet18.pt] [--minutes 9]
    python -m benchmarks.gpu --root FOLDER --device cpu --output FILE       # only shows that it runs

Pictures of 224 pixels, random weights without `--weights`, nothing is downloaded. Each measurement is five timed chunks
after a warm-up: at least 0.4 seconds of steps or of loading, an epoch of a job. The most important measurements come
first; those that would not end in time are marked as not reached. An epoch is 20,000 pictures: those of the folder,
each linked as often as that takes; decoded they must fit on half of the free disk.

Results go to gpu.json after each measurement, and from there into benchmarks/NOTEBOOK.md; with `--output` only to that
file. `--document` only writes the document.
"""

import datetime
import gc
import json
import logging
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torchvision

from benchmarks.common.documents import ROOT, publish
from benchmarks.common.driver import command_line
from benchmarks.gpu.documents import document
from benchmarks.gpu.jobs import CACHED, DECODED, TORCHVISION, Job, Road, enlarge
from benchmarks.gpu.steps import Limit, Setup
from finetune.data.loader import automatic_workers
from finetune.system.machine import num_cores, processor

RECORDS = ROOT / "benchmarks/gpu/gpu.json"

Measurement = Limit | Road | Job
Record = dict[str, Any]


def plan(cores: int) -> list[Measurement]:
    """Return all measurements, the most important first.

    First what the targets need, with the loading that decides how many workers a job has; then other arithmetic and
    another layout; then fewer workers, and the job without the cache.
    """
    roads = [
        Road(cached, num, 256)
        for num in (16, 8, 4, 2, 1)
        if num <= cores
        for cached in (True, False)
    ]
    others = [("bf16", False), ("tf32", True), ("tf32", False), ("fp32", True), ("fp32", False)]
    return [
        *(Limit("train", "bf16", True, batch_size) for batch_size in (256, 1024, 64)),
        *roads[:4],
        *(Job(road, size) for size in (256, 1024) for road in (CACHED, TORCHVISION)),
        *(Limit("train", precision, channels_last, 256) for precision, channels_last in others),
        Limit("predict", "bf16", True, 256),
        *roads[4:],
        *(Job(DECODED, size) for size in (256, 1024)),
    ]


def small_plan() -> list[Measurement]:
    """Return one measurement of each kind, small enough for a CPU."""
    limits = [Limit("train", "bf16", True, 16), Limit("predict", "fp32", False, 8)]
    return [*limits, Road(True, 1, 8), Road(False, 1, 8), Job(CACHED, 16), Job(TORCHVISION, 16)]


def measure_all(
    measurements: Sequence[Measurement],
    setup: Setup,
    deadline: float,
    keep: Callable[[list[Record]], None],
) -> list[Record]:
    """Measure what can be done until the deadline (of `time.monotonic`); a failure is recorded with its error.

    Args:
        measurements: In their order.
        setup: What they share.
        deadline: When all must be done.
        keep: Takes the records so far.
    """
    records: list[Record] = []
    for measurement in measurements:
        began = time.monotonic()
        record = {"kind": measurement.kind, **asdict(measurement)}
        if began + measurement.seconds > deadline:
            record["not_reached"] = "no time left"
        else:
            record |= result_of(measurement, setup, deadline, records)
        records.append(record)
        keep(records)
        shown = record.get("error") or record.get("not_reached")
        shown = shown or f"{statistics.median(record['rates']):.0f} pictures/s"
        names = " ".join(f"{name}={value}" for name, value in asdict(measurement).items())
        print(f"{names} {shown} ({time.monotonic() - began:.0f} s)", flush=True)
    return records


def result_of(
    measurement: Measurement, setup: Setup, deadline: float, records: Sequence[Record]
) -> Record:
    """Return what a measurement gave, or why it gave nothing."""
    gc.collect()  # what a failed measurement left
    if setup.device == "cuda":
        torch.cuda.empty_cache()
    try:
        if isinstance(measurement, Job):
            num_workers = best_workers(records, measurement.road == CACHED)
            return measurement.measure(setup, num_workers, deadline)
        return measurement.measure(setup)
    except TimeoutError as error:
        return {"not_reached": str(error)}
    except Exception as error:  # memory or shared memory that ran out, among others
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:500]}


def best_workers(records: Sequence[Record], cached: bool) -> int:
    """Return the fastest number of workers so far, with the cache or without; else what a job takes by itself."""
    roads = [r for r in records if r["kind"] == "road" and r["cached"] == cached and "rates" in r]
    if not roads:
        return automatic_workers(None)
    return max(roads, key=lambda r: statistics.median(r["rates"]))["num_workers"]


def about(setup: Setup) -> Record:
    """Return the machine and the versions."""
    is_cuda = setup.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "driver": driver() if is_cuda else None,
        "processor": processor(),
        "cores": num_cores(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchvision": str(torchvision.__version__),
        "cudnn": torch.backends.cudnn.version() if is_cuda else None,
        "date": datetime.date.today().isoformat(),
        "image_size": setup.image_size,
        "num_pictures": setup.num_pictures,
        "weights": "given" if setup.weights else "random",
        "quick": not is_cuda,
    }


def driver() -> str:
    """Return the version of NVIDIA's driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--root", type=Path, help="folder with train/CLASS/*")
    parser.add_argument("--weights", help="state dict of ResNet-18 that the jobs start from")
    parser.add_argument("--minutes", type=float, default=9, help="be done after this time")
    parser.add_argument("--pictures", type=int, default=20_000, help="least pictures of an epoch")
    parser.add_argument("--output", type=Path, default=RECORDS, help="JSON file of the results")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: small pictures, few steps"
    )
    parser.add_argument("--document", action="store_true", help="only write the document")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    if not args.document:
        if args.root is None:
            parser.error("--root is needed to measure")
        if args.device == "cpu" and args.output == RECORDS:
            parser.error("--device cpu needs an --output of its own")
        if args.device == "cuda" and not torch.cuda.is_available():
            parser.error("no CUDA device; --device cpu --output FILE shows that the script runs")
        measure(args, deadline)
    results = json.loads(args.output.read_text("utf-8"))
    if args.output == RECORDS:
        publish({"gpu": document(results["measurements"])})
    print(json.dumps(results["about"]), document(results["measurements"]), sep="\n\n")


def measure(args: Any, deadline: float) -> None:
    """Write the results to the file of the options."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    is_cuda = args.device == "cuda"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        os.environ["FINETUNE_CACHE"] = str(folder / "cache")
        root = enlarge(args.root, args.pictures if is_cuda else 32, folder / "pictures")
        setup = Setup(
            device=args.device,
            root=root,
            num_pictures=sum(1 for _ in (root / "train").glob("*/*")),
            folder=folder,
            weights=args.weights,
            image_size=224 if is_cuda else 32,
            epochs=6 if is_cuda else 3,
            seconds=0.4 if is_cuda else 0.0,
        )
        facts = about(setup)

        def keep(records: list[Record]) -> None:
            text = json.dumps({"about": facts, "measurements": records}, indent=1)
            args.output.write_text(f"{text}\n", "utf-8")

        measure_all(plan(facts["cores"]) if is_cuda else small_plan(), setup, deadline, keep)


if __name__ == "__main__":
    main()
