"""Send 10,000 requests, a tenth of them bad, and compare every good answer with `finetune predict`.

    python -m benchmarks.serving.attack --images FOLDER --checkpoint RUN

Bad ones: cut off, text, empty, bombs of pixels and of bytes, huge headers, no HTTP, other types, forms without an end,
bodies that come slowly or not at all, and clients that leave. The service's memory is read after a fifth of them, and
at the end.
"""

import asyncio
import csv
import random
import struct
import subprocess
import tempfile
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common.driver import command_line
from benchmarks.common.records import PROGRAM, keep
from benchmarks.serving.__main__ import RECORDS, form
from benchmarks.serving.client import Request, get, labels, post, resident, serving

CLIENTS = 32
_LARGEST = 32_000_000  # bytes of a body
_HEAD = "POST /predict HTTP/1.1\r\nHost: localhost\r\n"


def bomb(width: int, height: int) -> bytes:
    """Return a sound PNG of one colour, a thousandth of its size in memory."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        digest = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + digest

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    lines = zlib.compress(bytes((3 * width + 1) * height), 9)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", lines) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def bad_requests(image: bytes) -> dict[str, Request]:
    """Return the bad requests that are sound HTTP, by kind: body and headers."""
    body, headers = form([image])(0)
    return {
        "cut off": (image[: len(image) // 2], ""),
        "text": (b"hello " * 500, "Content-Type: text/plain\r\n"),
        "empty": (b"", ""),
        "pixels": (bomb(20_000, 15_000), ""),
        "bytes": (bytes(_LARGEST + 1), ""),
        "other type": (b"{}", "Content-Encoding: gzip\r\n"),
        "form without an end": (body[:-40], headers),
    }


def bad_bytes(image: bytes) -> dict[str, list[bytes]]:
    """Return what is sent otherwise, by kind: parts with a pause of 0.2 seconds after each."""
    return {
        "huge headers": [f"{_HEAD}X: ".encode() + b"x" * 10**6],
        "no HTTP": [b"\x16\x03\x01\x02\x00 hello\r\n\r\n"],
        "slow": [f"{_HEAD}Content-Length: 9999\r\n\r\n".encode(), *[b"x"] * 30],
        "gone": [f"{_HEAD}Content-Length: {len(image)}\r\n\r\n".encode() + image],
    }


@dataclass
class Attack:
    """The clients and what they see.

    Attributes:
        said: Class and probability of each image by `finetune predict`.
        number: How many requests are sent.
        counts: How often which answer came.
        wrong: Good requests without the right answer.
        memory: MB of the service, early and at the end.
        furthest: Largest difference of a probability.
    """

    host: str
    port: int
    said: dict[Path, tuple[str, float]]
    number: int
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    furthest: float = 0.0

    def __post_init__(self) -> None:
        self.contents = {path: path.read_bytes() for path in self.said}
        first = next(iter(self.contents.values()))
        self.requests = bad_requests(first)
        self.bytes = bad_bytes(first)
        self.kinds = [*self.requests, *self.bytes]

    async def run(self) -> None:
        """Send the requests."""
        todo = iter(range(self.number))
        rng = random.Random(0)
        await asyncio.gather(*(self.client(todo, rng) for _ in range(CLIENTS)))

    async def client(self, todo, rng: random.Random) -> None:
        stream = await asyncio.open_connection(self.host, self.port)
        for i in todo:
            path = rng.choice([*self.said])
            if i % 10 == 0:
                kind = self.kinds[i // 10 % len(self.kinds)]
                self.counts[f"{kind}: {await self.bad(kind)}"] += 1
                stream[1].close()  # it may have been idle for too long by now
                stream = await asyncio.open_connection(self.host, self.port)
                continue
            status, content = await post(stream, self.contents[path])
            self.counts[f"good: {status}"] += 1
            self.compare(path, status, content)
            if status == 200 and i in (self.number // 5 + 1, self.number - 1):
                self.memory.append(resident(await get(stream, "/metrics")))
        stream[1].close()

    def compare(self, path: Path, status: int, content: bytes) -> None:
        """Compare an answer with `finetune predict`."""
        if status != 200:
            self.wrong.append(f"{status} {content[:200]!r}")
            return
        ((label, probability),) = labels(content)
        expected, expected_probability = self.said[path]
        if label == expected:
            self.furthest = max(self.furthest, abs(probability - expected_probability))
        elif abs(probability - 0.5) > 0.02:
            said = f"{expected} {expected_probability}"
            self.wrong.append(f"{path}: {label} {probability}, predict says {said}")

    async def bad(self, kind: str) -> str:
        """Send a bad request; return the status of its answer, or how it ended."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            async with asyncio.timeout(60):
                if kind in self.requests:
                    body, headers = self.requests[kind]
                    return str((await post((reader, writer), body, headers=headers))[0])
                for part in self.bytes[kind]:
                    writer.write(part)
                    await asyncio.sleep(0.2 if kind == "slow" else 0)
                if kind == "gone":
                    await writer.drain()
                    return "gone"
                return (await reader.read())[9:12].decode() or "closed"
        except (ConnectionError, asyncio.IncompleteReadError):
            return "closed"
        except TimeoutError:
            return "NO ANSWER"
        finally:
            writer.close()


def predicted(run: str, images: Path) -> dict[Path, tuple[str, float]]:
    """Return class and probability of each image by `finetune predict`."""
    with tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/said.csv"
        command = [PROGRAM, "predict", run, str(images), "--output", output]
        subprocess.run(command, check=True, capture_output=True)
        with open(output, newline="") as file:
            rows = list(csv.DictReader(file))
    return {Path(row["path"]): (row["class"], float(row["probability"])) for row in rows}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--images", type=Path, required=True, help="folder of photographs")
    parser.add_argument("--checkpoint", required=True, help="a checkpoint, or a run's folder")
    parser.add_argument("--number", type=int, default=10_000)
    args = parser.parse_args()
    said = predicted(args.checkpoint, args.images)
    command = [PROGRAM, "serve", args.checkpoint, "--port", "0"]
    with serving(command) as (host, port, _):
        attack = Attack(host, port, said, args.number)
        asyncio.run(attack.run())
    for kind, count in sorted(attack.counts.items()):
        print(f"{count:6} {kind}")
    print(*attack.wrong[:20], sep="\n")
    early, late = attack.memory
    good = attack.counts["good: 200"]
    furthest = round(attack.furthest, 6)
    summary = (
        f"Of {args.number:,} requests by {CLIENTS} clients, a tenth bad, {good:,} good ones were answered and "
        f"{len(attack.wrong)} wrongly or not; the largest difference of a probability from `finetune predict` is "
        f"{furthest:g}. The service's memory was {early:.0f} MB after a fifth of them and {late:.0f} MB at "
        f"the end ({100 * (late / early - 1):+.1f} %)."
    )
    print(summary)
    record = {
        "about": "attack",
        "what": "attack",
        "summary": summary,
        "counts": dict(attack.counts),
    }
    record |= {"wrong": attack.wrong, "memory": attack.memory, "furthest": furthest}
    keep(RECORDS, record, ("about",))


if __name__ == "__main__":
    main()
