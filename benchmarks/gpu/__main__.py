"""How fast ResNet-18 trains on one GPU: the limit with pictures on the device, the data road alone, the whole job.

    python -m benchmarks.gpu --root FOLDER [--weights resnet18.pt] [--minutes 9]
    python -m benchmarks.gpu --root FOLDER --device cpu --quick        # only shows that it runs

Pictures of 224 pixels, random weights if none are given, nothing is fetched. Each measurement is five timed chunks
after a warm-up: of steps or of the road at least 0.4 seconds, of a job an epoch. The most important measurements come
first; those that would not be done in time are marked as not reached. An epoch is 20,000 pictures: those of the folder,
each linked as often as that takes; decoded they must fit on half of the free disk.

Results go to gpu.json beside this after each measurement, and from there into docs/benchmarks.md; with `--output` only
to that file. `--document` writes the document from gpu.json and measures nothing.
"""

import argparse
import datetime
import gc
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torchvision

from benchmarks.common.documents import ROOT, fill
from benchmarks.gpu.documents import document
from benchmarks.gpu.jobs import CACHED, DECODED, TORCHVISION, Job, Road, enlarge
from benchmarks.gpu.steps import Limit, Setup
from finetune.data.loader import automatic_workers
from finetune.system.machine import num_cores, processor

RECORDS = ROOT / "benchmarks/gpu/gpu.json"
BATCHES = (256, 1024, 64)
WORKERS = (16, 8, 4, 2, 1)

Measurement = Limit | Road | Job
Record = dict[str, Any]


def plan(cores: int) -> list[Measurement]:
    """Return all measurements, the most important first.

    First what the targets need, with the roads that say how many workers a job should have; then what compiling,
    another arithmetic and another layout would change; then the rest, what is compiled last.
    """
    trained, predicted = (
        [
            Limit(mode, *way)
            for way in product(("bf16", "tf32", "fp32"), (True, False), (False, True), BATCHES)
        ]
        for mode in ("train", "predict")
    )
    ours = [m for m in trained if m.precision == "bf16" and m.channels_last and not m.compiled]
    compiled = [m for m in trained if m.precision == "bf16" and m.channels_last and m.compiled]
    others = [m for m in trained + predicted if m.batch_size == 256 and not m.compiled]
    roads = [Road(cached, num, 256) for num in WORKERS if num <= cores for cached in (True, False)]
    main = [Job(road, size) for size in (256, 1024) for road in (CACHED, TORCHVISION)]
    decoded = [Job(DECODED, size) for size in (256, 1024)]
    eager_first = sorted(trained + predicted, key=lambda m: m.compiled)
    ordered: list[Measurement] = [
        *ours,
        *roads[:4],
        *main,
        *compiled[:1],
        *others,
        *roads,
        *decoded,
        *compiled,
        *eager_first,
    ]
    return list(dict.fromkeys(ordered))


def quick_plan() -> list[Measurement]:
    """Return one measurement of each kind, small enough for a CPU."""
    limits = [Limit("train", "bf16", True, False, 16), Limit("train", "bf16", True, True, 16)]
    limits.append(Limit("predict", "fp32", False, False, 8))
    return [*limits, Road(True, 1, 8), Road(False, 1, 8), Job(CACHED, 16), Job(TORCHVISION, 16)]


def measure_all(
    measurements: Sequence[Measurement], setup: Setup, deadline: float, keep: Any
) -> list[Record]:
    """Measure what can be done until the deadline (of `time.monotonic`); what fails is recorded with its error.

    Args:
        measurements: What to measure, in this order.
        setup: What they share.
        deadline: When all must be done.
        keep: Takes the records so far.
    """
    records: list[Record] = []
    for measurement in measurements:
        record = {"kind": measurement.kind, **asdict(measurement)}
        began = time.monotonic()
        if began + measurement.seconds > deadline:
            record["not_reached"] = "no time left"
        else:
            gc.collect()  # what a failed measurement left
            if setup.device == "cuda":
                torch.cuda.empty_cache()
            try:
                if isinstance(measurement, Job):
                    record |= measurement.measure(
                        setup, best_workers(records, measurement.road == CACHED), deadline
                    )
                else:
                    record |= measurement.measure(setup)
            except TimeoutError as error:
                record["not_reached"] = str(error)
            except (
                Exception
            ) as error:  # memory or shared memory that ran out, a compiler that is not there
                record["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            result = record.get("error") or record.get("not_reached")
            result = result or f"{statistics.median(record['rates']):.0f} pictures/s"
            took = f"({time.monotonic() - began:.0f} s)"
            print(
                *(f"{name}={value}" for name, value in asdict(measurement).items()),
                result,
                took,
                flush=True,
            )
        records.append(record)
        keep(records)
    return records


def best_workers(records: Sequence[Record], cached: bool) -> int:
    """Return how many workers were fastest so far, from the cache or not; where none were, what a job would take."""
    found = [r for r in records if r["kind"] == "road" and r["cached"] == cached and "rates" in r]
    return (
        max(found, key=lambda r: statistics.median(r["rates"]))["num_workers"]
        if found
        else automatic_workers(None)
    )


def about(setup: Setup, quick: bool) -> Record:
    """Return where and with what it was measured."""
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
        "quick": quick,
    }


def driver() -> str:
    """Return the version of NVIDIA's driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, help="folder with train/CLASS/*")
    parser.add_argument(
        "--weights", help="state dict of ResNet-18 that the jobs start from; random ones without it"
    )
    parser.add_argument("--minutes", type=float, default=9, help="be done after this time")
    parser.add_argument(
        "--pictures",
        type=int,
        default=20_000,
        help="least pictures of an epoch; the cache holds all",
    )
    parser.add_argument("--output", type=Path, default=RECORDS, help="JSON file of the results")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--quick", action="store_true", help="small pictures and few steps: only shows that it runs"
    )
    parser.add_argument("--document", action="store_true", help="measure nothing")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    if args.document:
        fill(
            ROOT / "docs/benchmarks.md",
            {"gpu": document(json.loads(RECORDS.read_text("utf-8"))["measurements"])},
        )
        return
    if args.root is None:
        parser.error("give a folder with train/CLASS/* by --root")
    if (args.device == "cpu" and not args.quick) or (args.quick and args.output == RECORDS):
        parser.error("--device cpu only goes with --quick, and --quick with an --output of its own")
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "no CUDA device here; --device cpu --quick shows that the script runs", file=sys.stderr
        )
        sys.exit(2)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        os.environ["FINETUNE_CACHE"] = str(folder / "cache")
        # compiling is to take what it takes at first
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")
        root = enlarge(args.root, 32 if args.quick else args.pictures, folder / "pictures")
        num = sum(1 for _ in (root / "train").glob("*/*"))
        small: Record = {
            "image_size": 32,
            "epochs": 3,
            "seconds": 0.0,
            "backend": "eager",
        }  # inductor takes minutes on a CPU
        real: Record = {"image_size": 224, "epochs": 6, "seconds": 0.4, "backend": "inductor"}
        setup = Setup(
            args.device, root, num, folder, args.weights, **(small if args.quick else real)
        )
        facts = about(setup, args.quick)

        def keep(records: list[Record]) -> None:
            args.output.write_text(
                json.dumps({"about": facts, "measurements": records}, indent=1) + "\n", "utf-8"
            )

        measurements = quick_plan() if args.quick else plan(facts["cores"])
        records = measure_all(measurements, setup, deadline, keep)
    if args.output == RECORDS:
        fill(ROOT / "docs/benchmarks.md", {"gpu": document(records)})
    print(json.dumps(facts), document(records), sep="\n\n")


if __name__ == "__main__":
    main()
