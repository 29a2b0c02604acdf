"""Complete jobs in subprocesses: `finetune fit` from the cache, and a plain loop with torchvision's loader."""

import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.documents import ROOT
from finetune.data.datasets.scan import scan

CACHED = "ours, cache"
TORCHVISION = "torchvision"
_NO_LIMIT = 1000  # GB: the folder decides


def measure_job(job: str, root: Path, settings: dict[str, Any]) -> dict[str, Any]:
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
        program = ["-m", "benchmarks.gpu.plain", "--root"]
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


def enlarge(root: Path, num_images: int, place: Path) -> Path:
    """Return a folder with links to the images of root/train, each as often as it takes to have `num_images`.

    An epoch must be long compared with its beginning, when the device waits for the first batches.
    """
    found = scan(str(root)).splits
    if "train" not in found:
        raise ValueError(f"{root} has no folder train")
    paths = [Path(path) for path in found["train"].paths]
    for i, path in zip(range(max(num_images, len(paths))), itertools.cycle(paths), strict=False):
        class_name, *names = path.relative_to(root / "train").parts
        link = place / "train" / class_name / f"{i // len(paths):03d}_{'_'.join(names)}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path.resolve())
    return place
