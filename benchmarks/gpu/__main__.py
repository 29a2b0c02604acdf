"""Measure how fast one GPU trains ResNet-18: the limit with images on the device, and complete jobs.

    python -m benchmarks.gpu --root FOLDER [--weights resnet18.pt]
    python -m benchmarks.gpu --root FOLDER --device cpu --records FILE       # only shows that it runs

Images of 224 pixels, random weights without `--weights`; nothing is downloaded. An epoch has 20,000 images: links to
those of the folder. Decoded, they must fit on half of the free disk. The results go to gpu.json and into
benchmarks/NOTEBOOK.md. Stop at any time, and start again to continue.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common.documents import ROOT, markdown, publish, spread
from benchmarks.common.driver import Benchmark
from benchmarks.common.records import where_and_when
from benchmarks.gpu.jobs import CACHED, TORCHVISION, enlarge, measure_job
from benchmarks.gpu.limit import measure_limit
from finetune.data.loader import automatic_workers

LIMIT = "limit"
# What the job with the cache is to reach, as a share of the limit and of the job with torchvision's loader.
LEAST_OF_LIMIT = 0.95
LEAST_OF_TORCHVISION = 3.0


class Run(NamedTuple):
    """What identifies a record; `what` is LIMIT or a job."""

    what: str
    batch_size: int


def plan(records: Sequence[dict]) -> Iterator[Run]:
    yield Run(LIMIT, 256)
    yield from (Run(job, 256) for job in (CACHED, TORCHVISION))
    yield from (Run(LIMIT, batch_size) for batch_size in (64, 1024))


def measure(run: Run, args: argparse.Namespace) -> dict:
    """Return the result of a run and its circumstances."""
    is_cuda = args.device == "cuda"
    image_size = 224 if is_cuda else 32
    # A CPU gets a small batch, as it only shows that the script runs.
    batch_size = run.batch_size if is_cuda else run.batch_size // 16
    if run.what == LIMIT:
        result = measure_limit(batch_size, args.device, image_size, 0.4 if is_cuda else 0.0)
    else:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            folder = Path(name)
            settings = {
                "image_size": image_size,
                "batch_size": batch_size,
                "num_workers": automatic_workers(None),
                "epochs": 6 if is_cuda else 3,
                "device": args.device,
                "weights": args.weights,
                "folder": folder,
            }
            root = enlarge(args.root, args.images if is_cuda else 32, folder / "images")
            result = measure_job(run.what, root, settings)
    device = torch.cuda.get_device_name() if is_cuda else "cpu"
    return {**result, "device": device, **where_and_when()}


def table(records: Sequence[dict]) -> str:
    """Return the tables of benchmarks/NOTEBOOK.md and whether the targets are met."""
    good = [r for r in records if "rates" in r]
    limits = {r["batch_size"]: r for r in good if r["what"] == LIMIT}
    rows = [
        [str(size), spread(r["rates"], 0), f"{r['peak_gb']:.1f}", f"{r['first_step_seconds']:.1f}"]
        for size, r in sorted(limits.items())
    ]
    head = ["training steps, batch", "images/s", "peak memory, GB", "seconds of the first step"]
    shown = [markdown(head, rows)]
    rows = []
    for r in good:
        if r["what"] != LIMIT:
            cells = [spread(r[name], 0) for name in ("rates", "printed")]
            share = f"{ratio(r, limits[r['batch_size']]):.2f}"
            rows.append([r["what"], str(r["batch_size"]), str(r["num_workers"]), *cells, share])
    head = ["job", "batch", "workers", "images/s, wall clock", "as printed", "share of the limit"]
    shown.append(markdown(head, rows))
    jobs = {r["what"]: r for r in good if r["batch_size"] == 256}
    lines = []
    for least, other, name in (
        (LEAST_OF_LIMIT, LIMIT, "the limit with images on the device"),
        (LEAST_OF_TORCHVISION, TORCHVISION, "the job with torchvision's loader"),
    ):
        value = ratio(jobs[CACHED], jobs[other])
        verdict = "met" if value >= least else "missed"
        words = f"batch 256, the job with the cache at least {least:g} times as fast as {name}"
        lines.append(f"- {verdict}: {words}: {value:.2f} times")
    return "\n\n".join([*shown, "\n".join(lines)])


def ratio(one: dict[str, Any], other: dict[str, Any]) -> float:
    return statistics.median(one["rates"]) / statistics.median(other["rates"])


def write(records: Sequence[dict]) -> None:
    """Write the tables if everything is measured."""
    measured = {BENCHMARK.key(r) for r in records if "rates" in r}
    if missing := set(plan(records)) - measured:
        print(f"the notebook stays as it is: not measured yet: {missing}")
        return
    publish({"gpu": table(records)})


BENCHMARK = Benchmark(ROOT / "benchmarks/gpu/gpu.json", Run, plan, write)


def main() -> None:
    parser = BENCHMARK.parser(__doc__)
    parser.add_argument("--root", type=Path, help="folder with train/CLASS/*")
    parser.add_argument("--weights", help="state dict of ResNet-18 that the jobs start from")
    parser.add_argument("--images", type=int, default=20_000, help="least images of an epoch")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: small images, few steps"
    )
    args = parser.parse_args()
    if not args.document:
        if args.root is None:
            parser.error("--root is needed to measure")
        if args.device == "cpu" and args.records is None:
            parser.error("--device cpu needs --records")
        if args.device == "cuda" and not torch.cuda.is_available():
            parser.error("no CUDA device; --device cpu --records FILE shows that the script runs")
    BENCHMARK.main(args, lambda run: measure(run, args))


if __name__ == "__main__":
    main()
