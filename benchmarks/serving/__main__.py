"""Measure `finetune serve` on loopback, beside `finetune predict`, no batching, and LitServe.

    python -m benchmarks.serving --pictures FOLDER --checkpoint RUN

Clients ask without a pause, 1, 8 and 64 at a time, in a process of their own on the same cores; the servers take turns,
three times each. The results go to benchmarks/serving/serving.json and into docs/benchmarks.md. LitServe is measured
where it is installed.
"""

import argparse
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.common.documents import ROOT, fill
from benchmarks.common.documents import spread as spread_of
from benchmarks.common.records import load as records_of
from benchmarks.common.records import save, where_and_when
from benchmarks.serving.client import finetune, load, serving

RECORDS = ROOT / "benchmarks/serving/serving.json"
CLIENTS, NUM_RUNS = (1, 8, 64), 3
_EDGE = "edge-of-a-part"


def raw(pictures: list[bytes]):
    return lambda n: (pictures[n % len(pictures)], "")


def form(pictures: list[bytes]):
    def request(n: int) -> tuple[bytes, str]:
        head = f'--{_EDGE}\r\nContent-Disposition: form-data; name="picture"; filename="a.jpg"\r\n\r\n'.encode()
        body = head + pictures[n % len(pictures)] + f"\r\n--{_EDGE}--\r\n".encode()
        return body, f"Content-Type: multipart/form-data; boundary={_EDGE}\r\n"

    return request


def predict_rate(run: str, pictures: list[Path]) -> float:
    """Return the pictures a second of `finetune predict`, from the seconds that many take more than few.

    A few are predicted once before, so that all that a start reads lies in memory.
    """
    seconds: list[float] = []
    few = max(1, len(pictures) // 10)
    with tempfile.TemporaryDirectory() as folder:
        for chosen in (pictures[:few], pictures[:few], pictures):
            listed = Path(folder, "list.txt")
            listed.write_text("".join(f"{path}\n" for path in chosen))
            began = time.perf_counter()
            command = finetune("predict", run, str(listed), "--output", f"{folder}/said.csv")
            subprocess.run(
                command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            seconds.append(time.perf_counter() - began)
    return (len(pictures) - few) / (seconds[2] - seconds[1])


def forward_ms(run: str) -> float:
    """Return the ms of a network's pass over one picture, in a process that does nothing else."""
    script = (
        "import sys, time, numpy as np\n"
        "from finetune.inference.predictor import Predictor\n"
        "p = Predictor(sys.argv[1], precision=None)\n"
        "x = np.zeros((1, p.image_size, p.image_size, 3), np.uint8)\n"
        "for _ in range(20): p.classify(x)\n"
        "t = time.perf_counter()\n"
        "for _ in range(100): p.classify(x)\n"
        "print(10 * (time.perf_counter() - t))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, checkpoint(run)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def checkpoint(run: str) -> str:
    return f"{run}/checkpoints/best.ckpt" if os.path.isdir(run) else run


def measure(run: str, paths: list[Path], seconds: float, keep) -> None:
    contents = [path.read_bytes() for path in paths]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    servers = {
        "finetune serve": (finetune("serve", run, "--port", "0"), raw(contents)),
        "the same without batching": (
            finetune("serve", run, "--port", "0", "--max_batch", "1"),
            raw(contents),
        ),
    }
    if importlib.util.find_spec("litserve"):
        peer = [sys.executable, "-m", "benchmarks.serving.litserve_peer", checkpoint(run), port]
        servers["LitServe, batches of up to 32"] = (peer, form(contents))
    found: dict[tuple[str, int], list[dict]] = {}
    rates, passes = [], []
    for _ in range(NUM_RUNS):
        rates.append(round(predict_rate(run, paths), 1))
        passes.append(round(forward_ms(run), 2))
        for name, (command, request) in servers.items():
            with serving(command, r"(127\.0\.0\.1|0\.0\.0\.0|localhost):(\d+)") as (
                _,
                its_port,
                pid,
            ):
                wait_for(its_port)
                for num in CLIENTS:
                    result = load("127.0.0.1", its_port, pid, num, seconds, request)
                    found.setdefault((name, num), []).append(result)
                    print(name, num, result, flush=True)
        _keep_all(run, rates, passes, found, keep)


def _keep_all(
    run: str,
    rates: list[float],
    passes: list[float],
    found: dict[tuple[str, int], list[dict]],
    keep,
) -> None:
    keep({"about": "predict", "what": Path(run).name, "rate": rates, "forward_ms": passes})
    for (name, num), results in found.items():
        values = {key: [result[key] for result in results] for key in results[0]}
        keep({"about": "load", "what": f"{name}, {num}", "server": name, "clients": num, **values})


def wait_for(port: int) -> None:
    """Wait until somebody listens."""
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"nobody listens at {port}")


def tables(records: list[dict]) -> dict[str, str]:
    """Return the Markdown tables of docs/benchmarks.md."""
    about = {r["about"]: r for r in records}
    lines = [
        "| server | clients | requests/s | p50, ms | p99, ms | processor, ms a request | the clients', ms |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in (r for r in records if r["about"] == "load"):
        figures = " | ".join(
            spread_of(r[name], 1) for name in ("rate", "p50", "p99", "processor", "client")
        )
        lines.append(f"| {r['server']} | {r['clients']} | {figures} |")
    blocks = {"serving_load": "\n".join(lines)}
    if "predict" in about:
        r = about["predict"]
        ours = {
            x["clients"]: x
            for x in records
            if x["about"] == "load" and x["server"] == "finetune serve"
        }
        share = median(ours[64]["rate"]) / median(r["rate"])
        passes = median(ours[8]["p99"]) / median(r["forward_ms"])
        blocks["serving_summary"] = (
            f"`finetune predict` reads and classifies {spread_of(r['rate'], 1)} of these pictures a second; 64 clients "
            f"of the service get {100 * share:.0f} % of that. One pass of the network over one picture takes "
            f"{spread_of(r['forward_ms'], 1)} ms; the 99th percentile of 8 clients is {passes:.1f} of them. "
            f"({r['machine']}, {r['date']}, n = {len(r['rate'])})"
        )
    if "attack" in about:
        r = about["attack"]
        blocks["serving_attack"] = r["told"]
    return blocks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pictures", type=Path, help="folder of photographs")
    parser.add_argument("--checkpoint", help="a checkpoint, or a run's folder")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--document", action="store_true", help="measure nothing")
    args = parser.parse_args()

    def keep(record: dict) -> None:
        old = [
            r
            for r in records_of(RECORDS)
            if (r["about"], r["what"]) != (record["about"], record["what"])
        ]
        save(RECORDS, [*old, {**record, **where_and_when()}])

    if not args.document:
        measure(args.checkpoint, sorted(args.pictures.rglob("*.jpg")), args.seconds, keep)
    fill(ROOT / "docs/benchmarks.md", tables(records_of(RECORDS)))


if __name__ == "__main__":
    main()
