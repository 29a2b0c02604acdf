"""Compare `finetune serve` on loopback with `finetune predict`, no batching, and LitServe.

    python -m benchmarks.serving --images FOLDER --checkpoint RUN

Clients ask without a pause, 1, 8 and 64 at a time, in a process of their own on the same cores; the servers take turns,
three times each. The results go to serving.json and into benchmarks/NOTEBOOK.md.
LitServe is measured if it is installed.
"""

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.common.documents import ROOT, markdown, publish, spread
from benchmarks.common.driver import command_line
from benchmarks.common.records import PROGRAM, keep, load
from benchmarks.serving.client import Load, Request, serving

RECORDS = ROOT / "benchmarks/serving/serving.json"
CLIENTS, NUM_RUNS = (1, 8, 64), 3
_EDGE = "edge-of-a-part"
# Prints the ms of a pass over one image.
_FORWARD = """
import sys, time, numpy as np
from finetune.inference.predictor import Predictor
p = Predictor(sys.argv[1], precision=None)
x = np.zeros((1, p.image_size, p.image_size, 3), np.uint8)
for _ in range(20): p.classify(x)
t = time.perf_counter()
for _ in range(100): p.classify(x)
print(10 * (time.perf_counter() - t))
"""


def raw(images: list[bytes]) -> Callable[[int], Request]:
    return lambda n: (images[n % len(images)], "")


def form(images: list[bytes]) -> Callable[[int], Request]:
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
        command = [PROGRAM, "predict", run, str(listed), "--output", f"{folder}/said.csv"]
        for chosen in (images[:few], images[:few], images):
            listed.write_text("".join(f"{path}\n" for path in chosen))
            began = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            seconds.append(time.perf_counter() - began)
    return (len(images) - few) / (seconds[2] - seconds[1])


def forward_ms(run: str) -> float:
    """Return the ms of a network's pass over one image, in a process that does nothing else."""
    command = [sys.executable, "-c", _FORWARD, checkpoint(run)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def checkpoint(run: str) -> str:
    return f"{run}/checkpoints/best.ckpt" if os.path.isdir(run) else run


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def measure(run: str, paths: list[Path], seconds: float) -> None:
    """Measure all servers in turn, and record the results after each round."""
    contents = [path.read_bytes() for path in paths]
    serve = [PROGRAM, "serve", run, "--port", "0"]
    servers = {
        "finetune serve": (serve, raw(contents)),
        "the same without batching": ([*serve, "--max_batch", "1"], raw(contents)),
    }
    if importlib.util.find_spec("litserve"):
        peer = [sys.executable, "-m", "benchmarks.serving.litserve_peer", checkpoint(run)]
        servers["LitServe, batches of up to 32"] = ([*peer, free_port()], form(contents))
    found: dict[tuple[str, int], list[dict]] = {}
    rates: list[float] = []
    passes: list[float] = []
    for _ in range(NUM_RUNS):
        rates.append(round(predict_rate(run, paths), 1))
        passes.append(round(forward_ms(run), 2))
        for name, (command, request) in servers.items():
            address = r"(127\.0\.0\.1|0\.0\.0\.0|localhost):(\d+)"
            with serving(command, address) as (_, port, pid):
                wait_for(port)
                for num in CLIENTS:
                    result = Load("127.0.0.1", port, num, seconds, request).measure(pid)
                    found.setdefault((name, num), []).append(result)
        what = {"about": "predict", "what": Path(run).name}
        keep(RECORDS, {**what, "rate": rates, "forward_ms": passes})
        for (name, num), results in found.items():
            values = {key: [result[key] for result in results] for key in results[0]}
            what = {"about": "load", "what": f"{name}, {num}", "server": name, "clients": num}
            keep(RECORDS, {**what, **values})


def wait_for(port: int) -> None:
    """Wait until a server listens."""
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"nobody listens at {port}")


def tables(records: list[dict]) -> dict[str, str]:
    """Return the Markdown tables of benchmarks/NOTEBOOK.md."""
    about = {r["about"]: r for r in records}
    loads = [r for r in records if r["about"] == "load"]
    names = ("rate", "p50", "p99", "processor", "client")
    head = ["server", "clients", "requests/s", "p50, ms", "p99, ms"]
    head += ["CPU time, ms a request", "clients' CPU time, ms"]
    rows = [[r["server"], str(r["clients"]), *(spread(r[n], 1) for n in names)] for r in loads]
    blocks = {"serving_load": markdown(head, rows)}
    if "predict" in about:
        r = about["predict"]
        ours = {x["clients"]: x for x in loads if x["server"] == "finetune serve"}
        share = median(ours[64]["rate"]) / median(r["rate"])
        passes = median(ours[8]["p99"]) / median(r["forward_ms"])
        blocks["serving_summary"] = (
            f"`finetune predict` reads and classifies {spread(r['rate'], 1)} of these images a second; 64 clients "
            f"of the service get {100 * share:.0f} % of that. One pass of the network over one image takes "
            f"{spread(r['forward_ms'], 1)} ms; the 99th percentile of 8 clients is {passes:.1f} passes. "
            f"({r['machine']}, {r['date']}, n = {len(r['rate'])})"
        )
    if "attack" in about:
        blocks["serving_attack"] = about["attack"]["summary"]
    return blocks


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--images", type=Path, help="folder of photographs")
    parser.add_argument("--checkpoint", help="a checkpoint, or a run's folder")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--document", action="store_true", help="only write the document")
    args = parser.parse_args()
    if not args.document:
        if not (args.images and args.checkpoint):
            parser.error("--images and --checkpoint are needed to measure")
        measure(args.checkpoint, sorted(args.images.rglob("*.jpg")), args.seconds)
    publish(tables(load(RECORDS)))


if __name__ == "__main__":
    main()
