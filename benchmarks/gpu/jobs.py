"""What is measured besides the limit: the data road alone, and whole jobs in processes of their own."""

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytorch_lightning as pl
from pytorch_lightning.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from benchmarks.common.documents import ROOT
from benchmarks.gpu.steps import NUM_CHUNKS, Setup
from finetune import ImageFolderData
from finetune.data.datasets.folders import scan
from finetune.data.loader import check_shared_memory
from finetune.data.samplers import TrainBatches

CACHED = "ours, cache"
DECODED = "ours, no cache"
TORCHVISION = "torchvision"
_NO_LIMIT = 1000  # GB: the folder decides
_WARM_UP = 3  # batches of each worker: what it made ahead while the others were still starting


@dataclass(frozen=True)
class Road:
    """From files, or from the cache of decoded pictures, to batches in pinned memory, by processes."""

    cached: bool
    num_workers: int
    batch_size: int

    kind: ClassVar[str] = "road"

    @property
    def seconds(self) -> float:
        """How long it may take, by estimate; whoever is first to need the cache builds it."""
        return 30 if self.cached else 12

    def measure(self, setup: Setup) -> dict[str, Any]:
        """Return pictures per second of each chunk, and the seconds until there was a cache."""
        began = time.perf_counter()
        data = ImageFolderData(
            str(setup.root),
            batch_size=self.batch_size,
            image_size=setup.image_size,
            min_crop=0.08,
            augmentations=None,
            val_fraction=0,
            num_workers=self.num_workers,
            cache_limit_gb=_NO_LIMIT if self.cached else 0,
        )
        # As many epochs as pay for a cache.
        options: dict[str, Any] = {"accelerator": setup.device, "devices": 1, "max_epochs": 1000}
        data.trainer = pl.Trainer(
            **options, logger=False, enable_checkpointing=False, enable_model_summary=False
        )
        data.trainer.state.fn = TrainerFn.FITTING
        data.setup("fit")
        data.use_cache()
        pictures = data.pictures("train", train=True)
        ready = time.perf_counter() - began
        if self.cached and data.splits["train"].cached is None:
            raise RuntimeError(
                f"no cache: it takes at most half of what is free beneath {setup.folder}"
            )
        batches = TrainBatches(len(data.splits["train"]), self.batch_size, 0, 0, 1)
        loader = DataLoader(
            pictures,
            batch_sampler=Endless(batches),
            **data.worker_options(self.batch_size),
        )
        return {
            "rates": road_rates(iter(loader), self.num_workers, setup.seconds),
            "ready_seconds": ready,
        }


class Endless:
    """One epoch's batches after another's, so that the workers never wait for a new epoch."""

    def __init__(self, batches: TrainBatches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Sequence[tuple[int, int]]]:
        for epoch in itertools.count():
            self.batches.set_epoch(epoch)
            yield from self.batches


def road_rates(batches: Iterator[dict[str, Any]], num_workers: int, seconds: float) -> list[float]:
    """Return pictures per second of each chunk; as workers come in turn, a chunk has as many batches of each."""
    for _ in range(_WARM_UP * num_workers):
        next(batches)
    rates = []
    for _ in range(NUM_CHUNKS):
        began = time.perf_counter()
        num = 0
        elapsed = 0.0
        while not num or elapsed < seconds:
            num += sum(len(next(batches)["label"]) for _ in range(num_workers))
            elapsed = time.perf_counter() - began
        rates.append(num / elapsed)
    return rates


@dataclass(frozen=True)
class Job:
    """Training from a folder: `finetune fit` with or without the cache, or `benchmarks.gpu.plain`."""

    road: str  # CACHED, DECODED or TORCHVISION
    batch_size: int

    kind: ClassVar[str] = "job"
    seconds: ClassVar[float] = 60  # that it may take, by estimate

    def measure(self, setup: Setup, num_workers: int, deadline: float) -> dict[str, Any]:
        """Return pictures per second of every epoch but the first, from one epoch's line to the next and as printed.

        From line to line all counts, checkpoints too. What `finetune fit` prints leaves these out, and is taken when
        the last steps have been given to the device, which may still be busy with them: the truth lies between.
        """
        bytes_a_value = 4 if self.road == TORCHVISION else 1
        num_workers = fitting(
            num_workers, bytes_a_value * 3 * self.batch_size * setup.image_size**2
        )
        began = time.perf_counter()
        with_cache = {"FINETUNE_CACHE": str(setup.folder / "cache"), "PYTHONPATH": python_path()}
        lines = epoch_lines(
            self.command(setup, num_workers), {**os.environ, **with_cache}, deadline
        )
        if len(lines) != setup.epochs:
            raise RuntimeError(
                f"the job wrote the lines of {len(lines)} epochs, not {setup.epochs}"
            )
        rates = [
            setup.num_pictures / (end - start) for (start, _), (end, _) in itertools.pairwise(lines)
        ]
        printed = [rate for _, rate in lines[1:]]
        seconds = time.perf_counter() - began
        return {"rates": rates, "printed": printed, "num_workers": num_workers, "seconds": seconds}

    def command(self, setup: Setup, num_workers: int) -> list[str]:
        """Return what is run."""
        if self.road == TORCHVISION:
            program = [sys.executable, "-m", "benchmarks.gpu.plain"]
            options: dict[str, Any] = {
                "--root": setup.root,
                "--image_size": setup.image_size,
                "--device": setup.device,
                "--batch_size": self.batch_size,
                "--num_workers": num_workers,
                "--epochs": setup.epochs,
            }
            options |= {"--weights": setup.weights} if setup.weights else {}
        else:
            program = [sys.executable, "-m", "finetune", "fit"]
            options = {
                "--data.root": setup.root,
                "--data.image_size": setup.image_size,
                "--data.val_fraction": 0,
                "--data.batch_size": self.batch_size,
                "--data.num_workers": num_workers,
                "--data.min_crop": 0.08,  # as torchvision
                "--data.augmentations": "null",
                "--data.cache_limit_gb": _NO_LIMIT if self.road == CACHED else 0,
                "--model.weights": setup.weights or "null",
                "--trainer.precision": "bf16-mixed",
                "--trainer.accelerator": setup.device,
                "--trainer.devices": 1,
                "--trainer.max_epochs": setup.epochs,
                "--trainer.default_root_dir": setup.folder / "runs",
            }
        return [*program, *(str(part) for option in options.items() for part in option)]


def fitting(num_workers: int, batch_bytes: int) -> int:
    """Return so many workers, or halved until shared memory has room for their batches."""
    while num_workers > 1:
        try:
            check_shared_memory(num_workers, batch_bytes)
            break
        except ValueError:
            num_workers //= 2
    return num_workers


def epoch_lines(
    command: Sequence[str], environment: dict[str, str], deadline: float
) -> list[tuple[float, float]]:
    """Run a job; return the time of each epoch's line and the pictures per second in it.

    Raises:
        RuntimeError: It failed.
        TimeoutError: It was not done at the deadline (of `time.monotonic`) and was ended.
    """
    found, last = [], ""
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # its workers are to end with it
    )
    timer = threading.Timer(
        max(deadline - time.monotonic(), 0), os.killpg, (process.pid, signal.SIGKILL)
    )
    timer.start()
    with process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                last = line.strip() or last
                if "decoded anew in every epoch" in line:
                    raise RuntimeError(f"no cache: {last}")
                if match := re.match(r"epoch \d+/\d+ .*?(\d+) images/s", line):
                    found.append((time.perf_counter(), float(match[1])))
        except BaseException:  # Ctrl-C does not reach it
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            timer.cancel()
    if process.returncode == -signal.SIGKILL and time.monotonic() >= deadline:
        raise TimeoutError(f"ended when the time was up, after {len(found)} epochs")
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {last}")
    return found


def python_path() -> str:
    """Return PYTHONPATH with this checkout before what it holds."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def enlarge(root: Path, num_pictures: int, place: Path) -> Path:
    """Return a folder with links to the pictures of root/train, each as often as it takes to have `num_pictures`.

    An epoch must be long beside its beginning, when the first batches are made and the device waits.
    """
    _, found = scan(root)
    if "train" not in found:
        raise ValueError(f"{root} has no folder train")
    paths = [Path(path) for path in found["train"].paths]
    for i, path in zip(range(max(num_pictures, len(paths))), itertools.cycle(paths), strict=False):
        class_name, *names = path.relative_to(root / "train").parts
        link = place / "train" / class_name / f"{i // len(paths):03d}_{'_'.join(names)}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path.resolve())
    return place
