"""A client that costs little beside the service it measures: HTTP/1.1 over asyncio's streams."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_LONGEST = 20.0  # seconds for an answer; who has waited that long asks no more
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextmanager
def serving(
    command: Sequence[str], address: str = r"http://([\w.]+):(\d+)"
) -> Iterator[tuple[str, int, int]]:
    """Start a service; give its host, port and process number, once it has said its address."""
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **pipe)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(address, line):
                break
        else:
            raise RuntimeError(f"{command} did not begin")
        # A service that logs would wait at a full pipe.
        threading.Thread(
            target=lambda rest: [None for _ in rest], args=(process.stdout,), daemon=True
        ).start()
        yield found[1], int(found[2]), process.pid
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # processes of its own, which some leave behind


def finetune(*arguments: str) -> list[str]:
    """Return the command line of a command of ours."""
    return [str(Path(sys.executable).with_name("finetune")), *arguments]


async def post(
    stream: Stream, body: bytes, path: str = "/predict", headers: str = ""
) -> tuple[int, bytes]:
    """Send a request, and return the status and the body of its answer."""
    reader, writer = stream
    length = f"Content-Length: {len(body)}\r\n"
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{length}{headers}\r\n".encode() + body
    )
    return await answer(reader)


async def get(stream: Stream, path: str) -> bytes:
    """Return the body of an answer to GET."""
    stream[1].write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return (await answer(stream[0]))[1]


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read an answer that states its length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return int(head.split(b" ", 2)[1]), await reader.readexactly(int(length[1]) if length else 0)


def load(
    host: str,
    port: int,
    pid: int,
    num_clients: int,
    seconds: float,
    request: Callable[[int], tuple[bytes, str]],
) -> dict[str, Any]:
    """Let clients ask one after the other without a pause, and return what they saw.

    Args:
        host: Of the service.
        port: Of the service.
        pid: Its process, whose processor time is counted.
        num_clients: That ask at a time.
        seconds: To measure, after a second of warming up.
        request: Gives body and headers of the n-th request.

    Returns:
        `rate` (requests a second), `p50`, `p99` (ms), `processor` (ms of the service a request), `client` (ms of its
        own), `failed` (with another status, or not answered).
    """

    async def run() -> dict[str, Any]:
        waits: list[float] = []
        count = failed = 0
        start = time.perf_counter() + 1
        end = start + seconds

        async def client() -> None:
            nonlocal count, failed
            stream = await asyncio.open_connection(host, port)
            while (began := time.perf_counter()) < end:
                body, headers = request(count)
                count += 1
                try:
                    async with asyncio.timeout(_LONGEST):
                        status, _ = await post(stream, body, headers=headers)
                except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
                    failed += 1
                    break
                failed += status != 200
                if began >= start:
                    waits.append(time.perf_counter() - began)
            stream[1].close()

        before = _processor(pid), time.process_time()
        await asyncio.gather(*(client() for _ in range(num_clients)))
        spent = (_processor(pid) - before[0]) / max(count, 1)
        own = (time.process_time() - before[1]) / max(count, 1)
        waits.sort()
        waits = waits or [float("nan")]
        p50, p99 = (
            1000 * waits[min(len(waits) - 1, int(share * len(waits)))] for share in (0.5, 0.99)
        )
        known = {
            "rate": len(waits) / seconds,
            "p50": p50,
            "p99": p99,
            "processor": 1000 * spent,
            "client": 1000 * own,
        }
        return {**{name: round(value, 1) for name, value in known.items()}, "failed": failed}

    return asyncio.run(run())


def _processor(pid: int) -> float:
    """Return the processor seconds of a process and of those that it has started, on Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    spent = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return spent + sum(
        _processor(int(child))
        for child in (children.read_text().split() if children.exists() else ())
    )


def resident(text: bytes) -> float:
    """Return the MB of memory that a service's metrics tell."""
    found = re.search(rb"(?m)^process_resident_memory_bytes (\S+)", text)
    return float(found[1]) / 1e6 if found else 0.0


def labels(content: bytes) -> list[tuple[str, float]]:
    """Return class and probability of each picture of an answer."""
    return [(one["label"], one["probability"]) for one in json.loads(content)["predictions"]]
