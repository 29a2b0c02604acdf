"""A client that takes little processor time compared with the service: HTTP/1.1 over asyncio's streams."""

import asyncio
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LONGEST = 20.0  # seconds for an answer; who has waited that long asks no more
Request = tuple[bytes, str]  # body and headers
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextmanager
def serving(
    command: Sequence[str], address: str = r"http://([\w.]+):(\d+)"
) -> Iterator[tuple[str, int, int]]:
    """Start a service; yield its host, port and process number when it has printed its address."""
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


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read an answer that states its length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return int(head.split(b" ", 2)[1]), await reader.readexactly(int(length[1]) if length else 0)


@dataclass
class Load:
    """Clients that ask one after the other without a pause.

    Attributes:
        host: Of the service.
        port: Of the service.
        num_clients: That ask at a time.
        seconds: To measure, after a second of warming up.
        request: Returns body and headers of the n-th request.
    """

    host: str
    port: int
    num_clients: int
    seconds: float
    request: Callable[[int], Request]

    def measure(self, pid: int) -> dict[str, Any]:
        """Return what the clients saw; `pid` is the service's process, whose processor time is counted.

        Returns:
            `rate` (requests a second), `p50`, `p99` (ms), `processor` (ms of the service a request), `client` (ms of
            its own), `num_failed` (with another status, or not answered).
        """
        self.waits: list[float] = []
        self.num_requests = 0
        self.num_failed = 0
        of_service = _processor(pid)
        own = time.process_time()
        asyncio.run(self._run())
        of_service = (_processor(pid) - of_service) / max(self.num_requests, 1)
        own = (time.process_time() - own) / max(self.num_requests, 1)
        waits = sorted(self.waits) or [float("nan")]
        figures = {
            "rate": len(waits) / self.seconds,
            "p50": 1000 * waits[len(waits) // 2],
            "p99": 1000 * waits[int(0.99 * len(waits))],
            "processor": 1000 * of_service,
            "client": 1000 * own,
        }
        rounded = {name: round(value, 1) for name, value in figures.items()}
        return {**rounded, "num_failed": self.num_failed}

    async def _run(self) -> None:
        start = time.perf_counter() + 1
        await asyncio.gather(*(self._client(start) for _ in range(self.num_clients)))

    async def _client(self, start: float) -> None:
        stream = await asyncio.open_connection(self.host, self.port)
        while (began := time.perf_counter()) < start + self.seconds:
            body, headers = self.request(self.num_requests)
            self.num_requests += 1
            try:
                async with asyncio.timeout(_LONGEST):
                    status, _ = await post(stream, body, headers=headers)
            except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
                self.num_failed += 1
                break
            if status != 200:
                self.num_failed += 1
            if began >= start:
                self.waits.append(time.perf_counter() - began)
        stream[1].close()


def _processor(pid: int) -> float:
    """Return the processor seconds of a process and of those that it has started, on Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    spent = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return spent + sum(
        _processor(int(child))
        for child in (children.read_text().split() if children.exists() else ())
    )
