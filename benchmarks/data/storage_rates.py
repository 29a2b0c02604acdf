"""Measure fits on images in object storage next to fits on the same folder on the disk.

    python -m benchmarks.data.storage_rates

999 drawn JPEG files of about 100 kB, 640x480 pixels, in 3 classes: 811 to train, 89 to validate. A server in another
process holds them in memory and waits before each answer. Each round takes its cases in a random order: the folder and
latencies, with the cache of decoded images and without. Three epochs of a small network at 28 pixels, so that
reading images takes nearly all the time; or two epochs of a ResNet-18 at 224 pixels, of 4 batches each. The first epoch
includes all that precedes it after the imports: checks that read images, and the cache. Later epochs: the median of
their seconds. The results go to benchmarks/data/storage_rates.json and into benchmarks/NOTEBOOK.md. Stop at any time,
and start again to continue.
"""

import csv
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import cv2
import numpy as np

from benchmarks.common.documents import ROOT, markdown, publish, spread
from benchmarks.common.driver import Benchmark
from benchmarks.common.records import where_and_when

# Latencies in milliseconds of each round; -1 is the disk.
_ROUNDS = [(-1, 0, 20, 100)] * 5
_NUM_TRAIN = 811
_COMMON = (
    "--model.weights null --trainer.accelerator cpu --trainer.precision 32-true --report false "
    "--test_after_fit false"
)
_NETWORKS = {
    "small_cnn, 28 px": "--model.backbone small_cnn --data.image_size 28 --trainer.max_epochs 3",
    "resnet18, 224 px": "--model.backbone resnet18 --data.image_size 224 --trainer.max_epochs 2 "
    "--trainer.limit_train_batches 4 --trainer.limit_val_batches 1",
}
_SERVER = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from object_server import ObjectServer
server = ObjectServer()
server.put_folder(Path(sys.argv[3]), "set")
print(server.port, flush=True)
for line in sys.stdin:
    milliseconds, megabytes = map(float, line.split())
    server.delay = milliseconds / 1000
    server.bytes_per_second = megabytes * 1e6 or None
    print(server.requests.total(), server.num_bytes, flush=True)
    server.requests.clear()
    server.num_bytes = 0
"""


class Run(NamedTuple):
    """What identifies a record. A latency of -1 is the disk; `cache_gb` is the limit of the cache."""

    network: str
    round: int
    cache_gb: int
    latency: int


def plan(records: Sequence[dict]) -> Iterator[Run]:
    for number, latencies in enumerate(_ROUNDS):
        # few batches of the ResNet-18 are read, so no cache is made
        kinds = [(network, 0) for network in _NETWORKS] + [(next(iter(_NETWORKS)), 8)]
        cases = [(*kind, latency) for kind in kinds for latency in latencies]
        random.Random(number).shuffle(cases)
        for network, cache_gb, latency in cases:
            yield Run(network, number, cache_gb, latency)


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

    def set_latency(self, milliseconds: int, megabytes_per_second: int = 0) -> tuple[int, int]:
        """Set the latency of answers, and the rate at which content arrives; 0 is no limit.

        Returns:
            The number of requests since the last call, and of the bytes that were sent.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{milliseconds} {megabytes_per_second}\n")
        self._process.stdin.flush()
        num_requests, num_bytes = map(int, self._line().split())
        return num_requests, num_bytes

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


def measure(run: Run, images: Path, server: Server) -> dict:
    """Fit in an empty folder; return the seconds before the first epoch and of each epoch."""
    root = str(images)
    if run.latency >= 0:
        root = "s3://photos/set"
        server.set_latency(run.latency)
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **server.environment}
        environment |= {"FINETUNE_CACHE": str(Path(folder, "cache")), "OMP_NUM_THREADS": "1"}
        options = [*f"{_COMMON} {_NETWORKS[run.network]}".split(), "--name", "run"]
        command = [sys.executable, "-m", "finetune", "fit", root, *options]
        command += ["--data.cache_limit_gb", str(run.cache_gb)]
        subprocess.run(command, cwd=folder, env=environment, check=True)
        path = Path(folder, "runs/fit/run")
        with (path / "metrics.csv").open() as file:
            epochs = [float(row["seconds"]) for row in csv.DictReader(file)]
        preparing = json.loads((path / "run.json").read_text())["seconds"]["preparing"]
    return {"preparing": preparing, "epochs": epochs, **where_and_when()}


def table(records: Sequence[dict]) -> str:
    """Return the rates relative to those of the disk in the same round: median, smallest and largest."""
    rows = []
    cases = {(r["network"], r["cache_gb"], r["latency"]): None for r in records}
    for network, cache_gb, latency in sorted(cases, key=lambda case: (case[0], -case[1], case[2])):
        of_case = [r for r in records if (r["network"], r["cache_gb"]) == (network, cache_gb)]
        seconds: dict[int, dict[int, tuple[float, float]]] = {}
        for r in of_case:
            first = r["preparing"] + r["epochs"][0]
            seconds.setdefault(r["round"], {})[r["latency"]] = (first, median(r["epochs"][1:]))
        both = [of_round for of_round in seconds.values() if {-1, latency} <= of_round.keys()]
        if not both:
            continue
        cells = []
        for part in (0, 1):
            cells.append(spread([of_round[latency][part] for of_round in both], 1))
            cells.append(
                spread([of_round[-1][part] / of_round[latency][part] for of_round in both], 2)
            )
        place = "disk" if latency < 0 else f"{latency} ms"
        rows.append([network, "yes" if cache_gb else "no", place, *cells, str(len(both))])
    head = ["network", "cache", "latency", "first epoch, s", "rate relative to the disk"]
    return markdown([*head, "later epoch, s", "relative", "n"], rows)


def measure_on_server(
    benchmark: Benchmark,
    measure: Callable[[Any, Path, Server], dict],
    description: str | None,
    draw: Callable[[Path], None] = draw_images,
) -> None:
    """Measure the runs of a benchmark with the drawn images and a server of them, which the first run prepares.

    Args:
        benchmark: The benchmark.
        measure: Returns the result of a run. It gets the folder of the images and the server.
        description: For the help of the command.
        draw: Draws the images in a folder.
    """
    args = benchmark.parser(description).parse_args()
    with ExitStack() as stack:

        @cache
        def prepared() -> tuple[Path, Server]:
            images = Path(stack.enter_context(tempfile.TemporaryDirectory()), "images")
            draw(images)
            return images, stack.enter_context(running_server(images))

        benchmark.main(args, lambda run: measure(run, *prepared()))


def main() -> None:
    benchmark = Benchmark(
        ROOT / "benchmarks/data/storage_rates.json",
        Run,
        plan,
        lambda records: publish({"storage_rates": table(records)}),
        named=("network",),
    )
    measure_on_server(benchmark, measure, __doc__)


if __name__ == "__main__":
    main()
