"""Compare `finetune serve` on loopback with `finetune predict` and LitServe.

    python -m benchmarks.speed serving --images FOLDER --checkpoint RUN

Clients ask without a pause, 1, 8 and 64 at a time, in a process of their own on the same cores; the servers take turns,
three times each. LitServe is measured if it is installed. Targets: 64 clients get 85 % of the rate of `predict`, and
the 99th percentile of 8 clients is at most 5 passes of the network.
"""

import argparse
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.driver import Benchmark
from benchmarks.common.records import PROGRAM, Record
from benchmarks.common.tables import markdown, spread
from benchmarks.speed.client import Load, Request, serving

CLIENTS = (1, 8, 64)
NUM_ROUNDS = 3
PREDICT = "finetune predict"
SERVE = "finetune serve"
LITSERVE = "LitServe, batches of up to 32"
_EDGE = "edge-of-a-part"
_ADDRESS = r"(127\.0\.0\.1|0\.0\.0\.0|localhost):(\d+)"


class Run(NamedTuple):
    """What identifies a record; PREDICT has no clients."""

    server: str
    clients: int
    round: int


def plan() -> Iterator[Run]:
    servers = [SERVE, LITSERVE] if importlib.util.find_spec("litserve") else [SERVE]
    for number in range(NUM_ROUNDS):
        yield Run(PREDICT, 0, number)
        yield from (Run(server, clients, number) for server in servers for clients in CLIENTS)


def raw(images: list[bytes]) -> Callable[[int], Request]:
    """Return the n-th image as the body of a request."""
    return lambda n: (images[n % len(images)], "")


def form(images: list[bytes]) -> Callable[[int], Request]:
    """Return the n-th image as a file of a form."""
    head = f'--{_EDGE}\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\n\r\n'
    end = f"\r\n--{_EDGE}--\r\n"
    headers = f"Content-Type: multipart/form-data; boundary={_EDGE}\r\n"
    return lambda n: (head.encode() + images[n % len(images)] + end.encode(), headers)


def predict_rate(run: str, images: list[Path]) -> float:
    """Return the images a second of `finetune predict`, from the seconds that many take more than few.

    A few are predicted once before, so that everything that a start reads is in memory.
    """
    seconds: list[float] = []
    few = max(1, len(images) // 10)
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "list.txt")
        command = [PROGRAM, "predict", run, str(listed), "--output", f"{folder}/predictions.csv"]
        for chosen in (images[:few], images[:few], images):
            listed.write_text("".join(f"{path}\n" for path in chosen))
            began = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            seconds.append(time.perf_counter() - began)
    return (len(images) - few) / (seconds[2] - seconds[1])


def measure(run: Run, args: argparse.Namespace) -> Record:
    """Return the result of a run: `rate` in requests a second, `p50`, `p99` and `processor` in ms."""
    paths = sorted(args.images.rglob("*.jpg"))
    if run.server == PREDICT:
        return {"rate": round(predict_rate(args.checkpoint, paths), 1)}
    contents = [path.read_bytes() for path in paths]
    request = raw(contents)
    command = [PROGRAM, "serve", args.checkpoint, "--port", "0"]
    if run.server == LITSERVE:
        checkpoint = args.checkpoint
        if os.path.isdir(checkpoint):
            checkpoint = f"{checkpoint}/checkpoints/best.ckpt"
        command = [sys.executable, "-m", "benchmarks.speed.litserve_peer", checkpoint, free_port()]
        request = form(contents)
    with serving(command, _ADDRESS) as (_, port, pid):
        wait_for(port)
        return Load("127.0.0.1", port, run.clients, args.seconds, request).measure(pid)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def wait_for(port: int) -> None:
    """Wait until a server listens."""
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"nobody listens at {port}")


def table(records: Sequence[Record]) -> str:
    """Return a row for each server and number of clients: medians over the rounds."""
    rows = []
    for server, clients in dict.fromkeys((r["server"], r["clients"]) for r in records):
        found = [r for r in records if (r["server"], r["clients"]) == (server, clients)]
        columns = {
            name: [r[name] for r in found if name in r]
            for name in ("rate", "p50", "p99", "processor")
        }
        cells = [spread(values, 1) if values else "–" for values in columns.values()]
        rows.append([server, str(clients or "–"), *cells])
    head = ["program", "clients", "images/s", "p50, ms", "p99, ms", "CPU time, ms a request"]
    return markdown(head, rows)


BENCHMARK = Benchmark("serving", Run, table)


def main() -> None:
    parser = BENCHMARK.parser(__doc__)
    parser.add_argument("--images", type=Path, help="folder of photographs")
    parser.add_argument("--checkpoint", help="a checkpoint, or a run's folder")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    args = parser.parse_args()
    if not args.document and not (args.images and args.checkpoint):
        parser.error("--images and --checkpoint are needed to measure")
    BENCHMARK.main(args, plan(), lambda run: measure(run, args))


if __name__ == "__main__":
    main()
