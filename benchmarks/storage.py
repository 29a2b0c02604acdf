"""Measure fits on images in object storage next to fits on the same folder on the disk.

    python -m benchmarks.storage

999 drawn JPEG files of about 100 kB, 640x480 pixels, in 3 classes: 811 to train, 89 to validate. A server in another
process holds them in memory and waits before each answer. Each round takes its cases in a random order: the folder and
latencies, with the cache of decoded images and without. Three epochs of a small network at 28 pixels, so that
reading images takes nearly all the time. The first epoch includes all that precedes it after the imports: checks that
read images, and the cache. Later epochs: the median of their seconds.
"""

import csv
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

import cv2
import numpy as np

from benchmarks.common.driver import Benchmark
from benchmarks.common.records import ROOT, Record
from benchmarks.common.tables import markdown, spread

# Latencies in milliseconds of each round; -1 is the disk.
_ROUNDS = [(-1, 0, 20, 100)] * 5
_OPTIONS = (
    "--backbone small_cnn --weights null --size 28 --epochs 3 --trainer.accelerator cpu --precision 32-true "
    "--report false --test_after_fit false --name run"
)
_SERVER = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from object_server import ObjectServer
server = ObjectServer()
server.put_folder(Path(sys.argv[3]), "set")
print(server.port, flush=True)
for line in sys.stdin:
    server.delay = float(line) / 1000
    print("set", flush=True)
"""


class Run(NamedTuple):
    """What identifies a record. A latency of -1 is the disk; `cache_gb` is the limit of the cache."""

    round: int
    cache_gb: int
    latency: int


def plan() -> Iterator[Run]:
    for number, latencies in enumerate(_ROUNDS):
        cases = [(cache_gb, latency) for cache_gb in (0, 8) for latency in latencies]
        random.Random(number).shuffle(cases)
        for cache_gb, latency in cases:
            yield Run(number, cache_gb, latency)


def draw_images(root: Path) -> None:
    """Write 300 noisy JPEG files of about 100 kB for each of three classes to train, and 33 to test."""
    rng = np.random.default_rng(0)
    for split, num in (("train", 300), ("test", 33)):
        for channel, name in enumerate(("blue", "green", "red")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(num):
                coarse = rng.integers(0, 200, (60, 80, 3)).astype(np.uint8)
                smooth = cv2.resize(coarse, (640, 480), interpolation=cv2.INTER_CUBIC)
                noisy = smooth + rng.integers(-14, 14, smooth.shape)
                noisy[:, :, channel] += 40  # BGR, as OpenCV has it
                image = noisy.clip(0, 255).astype(np.uint8)
                cv2.imwrite(str(folder / f"{i:03d}.jpg"), image, [cv2.IMWRITE_JPEG_QUALITY, 86])


class Server:
    """The server's process. `environment` has the variables of its clients."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.environment = {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._line()}",
        }

    def set_latency(self, milliseconds: int) -> None:
        """Set the latency of answers."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{milliseconds}\n")
        self._process.stdin.flush()
        self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def running_server(images: Path) -> Iterator[Server]:
    command = [sys.executable, "-c", _SERVER, str(ROOT), str(ROOT / "tests/support"), str(images)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Server(process)
        process.kill()


def measure(run: Run, images: Path, server: Server) -> Record:
    """Fit in an empty folder; return the seconds before the first epoch and of each epoch."""
    root = str(images)
    if run.latency >= 0:
        root = "s3://photos/set"
        server.set_latency(run.latency)
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **server.environment}
        environment |= {"FINETUNE_CACHE": str(Path(folder, "cache")), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "finetune", "fit", root, *_OPTIONS.split()]
        command += ["--data.cache_limit_gb", str(run.cache_gb)]
        subprocess.run(command, cwd=folder, env=environment, check=True)
        path = Path(folder, "runs/fit/run")
        with (path / "metrics.csv").open() as file:
            epochs = [float(row["seconds"]) for row in csv.DictReader(file)]
        preparing = json.loads((path / "run.json").read_text())["seconds"]["preparing"]
    return {"preparing": preparing, "epochs": epochs}


def table(records: Sequence[Record]) -> str:
    """Return seconds: median, smallest and largest; and medians of the rates relative to the disk in the same round."""
    rows = []
    cases = {(r["cache_gb"], r["latency"]) for r in records}
    for cache_gb, latency in sorted(cases, key=lambda case: (-case[0], case[1])):
        seconds: dict[int, dict[int, tuple[float, float]]] = {}
        for r in records:
            if r["cache_gb"] == cache_gb:
                times = (r["preparing"] + r["epochs"][0], median(r["epochs"][1:]))
                seconds.setdefault(r["round"], {})[r["latency"]] = times
        both = [of_round for of_round in seconds.values() if {-1, latency} <= of_round.keys()]
        cells = []
        for part in (0, 1):
            cells.append(spread([of_round[latency][part] for of_round in both], 1))
            ratios = [of_round[-1][part] / of_round[latency][part] for of_round in both]
            cells.append(f"{median(ratios):.2f}")
        place = "disk" if latency < 0 else f"{latency} ms"
        rows.append(["yes" if cache_gb else "no", place, *cells])
    head = [
        "cache",
        "latency",
        "first epoch, s",
        "relative rate",
        "later epoch, s",
        "relative rate",
    ]
    return markdown(head, rows)


BENCHMARK = Benchmark("storage", Run, table)


def main() -> None:
    args = BENCHMARK.parser(__doc__).parse_args()
    with ExitStack() as stack:

        @cache
        def prepared() -> tuple[Path, Server]:
            images = Path(stack.enter_context(tempfile.TemporaryDirectory()), "images")
            draw_images(images)
            return images, stack.enter_context(running_server(images))

        BENCHMARK.main(args, plan(), lambda run: measure(run, *prepared()))


if __name__ == "__main__":
    main()
