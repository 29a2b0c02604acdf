"""Measure how fast one GPU trains ResNet-18: the limit with images on the device, and complete jobs.

    python -m benchmarks.speed gpu --root FOLDER [--weights resnet18.pt]
    python -m benchmarks.speed gpu --root FOLDER --device cpu --records FILE       # only shows that it runs

Images of 224 pixels, random weights without `--weights`; nothing is downloaded. An epoch has 20,000 images: links to
those of the folder. Decoded, they must fit on half of the free disk. Targets: the job with the cache has 0.95 of the
limit, and 3 times the rate of the job with torchvision's loader.
"""

import argparse
import itertools
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.common.driver import Benchmark
from benchmarks.common.records import ROOT, Record
from benchmarks.common.tables import markdown, spread

LIMIT = "limit"
CACHED = "ours, cache"
TORCHVISION = "torchvision"
NUM_CHUNKS = 5  # of steps, timed one after another, after a warm-up
_MIN_WARM_UP = 3  # steps: cuDNN chooses its kernels in the first, the optimizer makes its state
_NO_LIMIT = 1000  # GB: the folder decides


class Run(NamedTuple):
    """What identifies a record; `what` is LIMIT or a job."""

    what: str
    batch_size: int


RUNS = [Run(what, 256) for what in (LIMIT, CACHED, TORCHVISION)]


def measure(run: Run, args: argparse.Namespace) -> Record:
    """Return the rates of a run."""
    is_cuda = args.device == "cuda"
    # A CPU gets small images and batches, as it only shows that the script runs.
    image_size = 224 if is_cuda else 32
    batch_size = run.batch_size if is_cuda else run.batch_size // 16
    if run.what == LIMIT:
        result = measure_limit(batch_size, args.device, image_size, 0.4 if is_cuda else 0.0)
    else:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            settings = {
                "image_size": image_size,
                "batch_size": batch_size,
                "num_workers": len(os.sched_getaffinity(0)),
                "epochs": 6 if is_cuda else 3,
                "device": args.device,
                "weights": args.weights,
                "folder": Path(folder),
            }
            num_images = args.images if is_cuda else 32
            root = enlarge(args.root, num_images, Path(folder, "images"))
            result = measure_job(run.what, root, settings)
    device = torch.cuda.get_device_name() if is_cuda else "cpu"
    return {**result, "device": device}


def measure_limit(batch_size: int, device: str, image_size: int, seconds: float) -> Record:
    """Train ResNet-18 on one batch in bf16 and channels_last, as a job on a GPU does.

    Args:
        batch_size: Images per step.
        device: cuda or cpu.
        image_size: Side of the images in pixels.
        seconds: Least length of a timed chunk.

    Returns:
        Images per second of each chunk, seconds of the first step, peak memory in GB.
    """
    is_cuda = device == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    step = training_step(batch_size, device, image_size)
    first = timed(step, 1, device)
    warm_up: list[float] = []
    while len(warm_up) < _MIN_WARM_UP or sum(warm_up) < seconds:
        warm_up.append(timed(step, 1, device))
    num_steps = math.ceil(seconds / min(warm_up)) or 1
    rates = [num_steps * batch_size / timed(step, num_steps, device) for _ in range(NUM_CHUNKS)]
    peak = torch.cuda.max_memory_allocated() / 1e9 if is_cuda else 0.0
    return {"rates": rates, "first_step_seconds": first, "peak_gb": peak}


def training_step(batch_size: int, device: str, image_size: int) -> Callable[[], None]:
    """Return a function that trains on the batch once."""
    from finetune import Classifier

    names = [f"class {k}" for k in range(10)]
    model = Classifier(names, weights=None, scheduler=None).to(device).train()
    optimizer = model.configure_optimizers()
    shape = (batch_size, 3, image_size, image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (batch_size,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return step


def timed(step: Callable[[], None], num_steps: int, device: str) -> float:
    """Return the seconds of steps that begin on an idle device, until it is idle again."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(num_steps):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def enlarge(root: Path, num_images: int, place: Path) -> Path:
    """Return a folder with links to the images of root/train, each as often as it takes to have `num_images`.

    An epoch must be long compared with its beginning, when the device waits for the first batches.
    """
    paths = sorted((root / "train").glob("*/*"))
    if not paths:
        raise ValueError(f"{root} has no images in train/CLASS")
    for i, path in zip(range(max(num_images, len(paths))), itertools.cycle(paths), strict=False):
        link = place / "train" / path.parent.name / f"{i // len(paths):03d}_{path.name}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path.resolve())
    return place


def measure_job(job: str, root: Path, settings: dict[str, Any]) -> Record:
    """Run a job and return its images per second in every epoch but the first.

    `rates` are from one epoch's line to the next, checkpoints included. `printed` are those of the lines, which leave
    out checkpoints and the last steps that the device has not finished. The true rate of the steps is between them.

    Args:
        job: CACHED or TORCHVISION.
        root: Folder with train/CLASS/*.
        settings: `image_size`, `batch_size`, `num_workers`, `epochs`, `device`, `weights`, and `folder` for the output.
    """
    num_images = sum(1 for _ in (root / "train").glob("*/*"))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    cache = str(settings["folder"] / "cache")
    environment = {**os.environ, "FINETUNE_CACHE": cache, "PYTHONPATH": path}
    lines = epoch_lines(command(job, root, settings), environment)
    if len(lines) != settings["epochs"]:
        raise RuntimeError(f"the job wrote the lines of {len(lines)} epochs")
    rates = [num_images / (end - start) for (start, _), (end, _) in itertools.pairwise(lines)]
    printed = [rate for _, rate in lines[1:]]
    return {"rates": rates, "printed": printed, "num_workers": settings["num_workers"]}


def command(job: str, root: Path, settings: dict[str, Any]) -> list[str]:
    """Return the command of a job."""
    if job == TORCHVISION:
        names = ("image_size", "batch_size", "num_workers", "epochs", "device")
        options = {f"--{name}": settings[name] for name in names}
        if settings["weights"]:
            options["--weights"] = settings["weights"]
        program = ["-m", "benchmarks.speed.gpu_plain", "--root"]
    else:
        options = {
            "--data.image_size": settings["image_size"],
            "--data.val_fraction": 0,
            "--data.batch_size": settings["batch_size"],
            "--data.num_workers": settings["num_workers"],
            "--data.min_crop": 0.08,  # as torchvision
            "--data.augmentations": "null",
            "--data.cache_limit_gb": _NO_LIMIT,
            "--model.weights": settings["weights"] or "null",
            "--trainer.precision": "bf16-mixed",
            "--trainer.accelerator": settings["device"],
            "--trainer.devices": 1,
            "--trainer.max_epochs": settings["epochs"],
            "--trainer.default_root_dir": settings["folder"] / "runs",
        }
        program = ["-m", "finetune", "fit", "--data.root"]
    words = [str(word) for option in options.items() for word in option]
    return [sys.executable, *program, str(root), *words]


def epoch_lines(command: Sequence[str], environment: dict[str, str]) -> list[tuple[float, float]]:
    """Run a job; return the time of each epoch's line and the images per second in it."""
    found = []
    last = ""
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, **pipe) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = line.strip() or last
            if match := re.match(r"epoch \d+/\d+ .*?(\d+) images/s", line):
                found.append((time.perf_counter(), float(match[1])))
    if process.returncode:
        print(last, file=sys.stderr)
        raise subprocess.CalledProcessError(process.returncode, command)
    return found


def table(records: Sequence[Record]) -> str:
    """Return the limit, and the jobs as a share of it."""
    by_job = {r["what"]: r["rates"] for r in records}
    rows = []
    for run in RUNS:
        share = statistics.median(by_job[run.what]) / statistics.median(by_job[LIMIT])
        rows.append([run.what, spread(by_job[run.what], 0), f"{share:.2f}"])
    return markdown(["job", "images/s", "share of the limit"], rows)


BENCHMARK = Benchmark("gpu", Run, table)


def main() -> None:
    parser = BENCHMARK.parser(__doc__)
    parser.add_argument("--root", type=Path, help="folder with train/CLASS/*")
    parser.add_argument("--weights", help="state dict of ResNet-18 that the jobs start from")
    parser.add_argument("--images", type=int, default=20_000, help="least images of an epoch")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    if not args.document:
        if args.root is None:
            parser.error("--root is needed to measure")
        if args.device == "cpu" and args.records is None:
            parser.error("--device cpu needs --records")
        if args.device == "cuda" and not torch.cuda.is_available():
            parser.error("no CUDA device; --device cpu --records FILE shows that the script runs")
    BENCHMARK.main(args, RUNS, lambda run: measure(run, args))


if __name__ == "__main__":
    main()
