"""Thousands of hostile requests to a `finetune serve` process over the network: no failure, no hang, bounded memory.

What each of them is answered: test_server.py. Among good requests, in one process: test_hostile_requests.py.
"""

import asyncio
import os
import re
import struct
import time
import zlib
from collections import Counter
from pathlib import Path
from urllib.parse import quote

import numpy as np
from mutated_files import other_bytes
from processes import start
from promise import promise
from small_fits import write_checkpoints

CLIENTS = 64
LONGEST = 60.0  # seconds for an answer; the service gives up on a request after 30
LARGEST = 32_000_000  # bytes of a body
FORM = (
    b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n%b\r\n--x--\r\n'
)
FORM_HEADERS = ("Content-Type: multipart/form-data; boundary=x",)
PATHS = ("/predict", "/model", "/metrics", "/%00", "/../etc/passwd", "http://a/predict", "*", "")
QUERIES = ("top_k=-1", "top_k=nan", "top_k=" + "9" * 5000, "other=1", "heatmap=\xff", "=&&=")
HEADERS = (
    "Content-Encoding: gzip",
    "Content-Type: multipart/form-data",
    "Content-Type: multipart/form-data; boundary=" + "x" * 9000,
    "Content-Type: multipart/form-data; boundary=x; charset=idna",
    "Host: evil.example",
    "Content-Length: -1",
    "Content-Length: 99999999999999999999",
    "Transfer-Encoding: chunked",
    "Transfer-Encoding: gzip, chunked",
    "Authorization: Bearer \xff",
    "Expect: 100-continue",
    "X: " + "x" * 100_000,
    "X\0: y",
    " X: y",
)


def request(
    body: bytes, method: str = "POST", path: str = "/predict", headers: tuple[str, ...] = ()
) -> bytes:
    length = (
        () if any("Content-Length" in one for one in headers) else (f"Content-Length: {len(body)}",)
    )
    lines = (f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *length, *headers)
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def bomb(side: int = 20_000) -> bytes:
    """Return a sound PNG of one colour, a thousandth of its size in memory."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    lines = zlib.compress(bytes((side + 1) * side), 9)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", lines) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


BOMB = bomb()


def hostile(image: bytes, number: int) -> tuple[bytes, bool]:
    """Return what a hostile client sends, and whether it leaves then; always the same by its number."""
    rng = np.random.default_rng(number)
    if number % 500 == 0:
        return request(bytes(LARGEST + 1)), False
    form = rng.integers(9)
    if form == 0:
        return request(other_bytes(image, rng)), False
    if form == 1:
        return request(other_bytes(FORM % image, rng), headers=FORM_HEADERS), False
    if form == 2:
        return other_bytes(request(image), rng), True
    if form == 3:
        return request(image, path=f"/predict?{rng.choice(QUERIES)}"), False
    if form == 4:
        return request(image, headers=(str(rng.choice(HEADERS)),)), False
    if form == 5:
        method = str(rng.choice(["GET", "PUT", "DELETE", "OPTIONS", "CONNECT", "A" * 300, "\0"]))
        return request(image, method, quote(str(rng.choice(PATHS)), safe="/:*%.")), False
    if form == 6:
        return request((FORM % image)[: rng.integers(1, len(image))], headers=FORM_HEADERS), False
    if form == 7:
        return request(image)[: rng.integers(1, len(image))], True
    return (request(BOMB), False) if rng.random() < 0.1 else (rng.bytes(300), True)


async def answer(address: tuple[str, int], sent: bytes, leaves: bool = False) -> str:
    """Return the status of the answer, or how the request ended."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        async with asyncio.timeout(LONGEST):
            writer.write(sent)
            if leaves:
                writer.write_eof()
            line = await reader.readline()
            await reader.read()
            return line[9:12].decode() or "closed"
    except ConnectionError:
        return "closed"
    except TimeoutError:
        return "NO ANSWER"
    finally:
        writer.close()


async def attack(
    address: tuple[str, int], image: bytes, numbers: list[int]
) -> tuple[Counter[str], Counter[str]]:
    """Send hostile requests, and a good one after each tenth; return how often which answer came to each kind."""
    bad: Counter[str] = Counter()
    good: Counter[str] = Counter()
    todo = iter(numbers)

    async def client() -> None:
        for number in todo:
            bad[await answer(address, *hostile(image, number))] += 1
            if number % 10 == 0:
                good[await answer(address, request(image))] += 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return bad, good


def resident(pid: int) -> int:
    """Return the megabytes that only this process has."""
    (kilobytes,) = re.findall(r"RssAnon:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(kilobytes) // 1024


@promise("hostile-requests")
def test_serve_outlives_hostile_clients(colours, tmp_path, trials, record_row):
    checkpoint = write_checkpoints(tmp_path, colours, "small_cnn", 28) / "plain.ckpt"
    image = next(Path(colours, "test").rglob("*.png")).read_bytes()
    process = start("serve", checkpoint, "--port", 0, cwd=tmp_path)
    try:
        while not (found := re.search(r"http://([\w.]+):(\d+)", process.stdout)):
            assert process.poll() is None, process.stderr
            time.sleep(0.05)
        address = (found[1], int(found[2]))
        numbers = list(range(trials(1_000, 10_000)))
        first = len(numbers) // 5
        bad, good = asyncio.run(attack(address, image, numbers[:first]))
        early = resident(process.pid)
        later = asyncio.run(attack(address, image, numbers[first:]))
        late = resident(process.pid)
        bad += later[0]
        good += later[1]
        handles = len(os.listdir(f"/proc/{process.pid}/fd"))
        process.send_signal(15)
        assert process.wait(60) == 0, process.stderr
    finally:
        process.kill()
    record_row(
        "hostile request to a serve process", len(numbers), f"{dict(bad)}; {early} to {late} MB"
    )
    assert "NO ANSWER" not in bad and not any(status.startswith("5") for status in bad), bad
    assert bad["422"] and bad["400"] and bad["413"] and bad["closed"], bad  # many were understood
    assert set(good) == {"200"}, good
    assert late < 1.25 * early + 50 and handles < 100
    assert "Traceback" not in process.stderr
