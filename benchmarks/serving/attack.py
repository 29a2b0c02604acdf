"""Send 10,000 requests, a tenth of them bad, and hold every good answer against `finetune predict`.

    python -m benchmarks.serving.attack --pictures FOLDER --checkpoint RUN

Bad ones: cut off, text, empty, bombs of pixels and of bytes, huge headers, no HTTP, other types, forms without an end,
bodies that come slowly or not at all, and clients that go away. The service's memory is read after a fifth of them, and
at the end.
"""

import argparse
import asyncio
import csv
import random
import struct
import subprocess
import tempfile
import zlib
from collections import Counter
from pathlib import Path

from benchmarks.common.records import load as records_of
from benchmarks.common.records import save, where_and_when
from benchmarks.serving.__main__ import RECORDS, form
from benchmarks.serving.client import finetune, get, labels, post, resident, serving

CLIENTS = 32


def bomb(width: int, height: int) -> bytes:
    """Return a sound PNG of one colour, a thousandth of its size in memory."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    lines = zlib.compress(bytes((3 * width + 1) * height), 9)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", lines) + chunk(b"IEND", b"")
    )


async def bad(kind: str, host: str, port: int, picture: bytes, bombs: dict[str, bytes]) -> str:
    """Send a bad request; return the status of its answer, or what became of it."""
    reader, writer = await asyncio.open_connection(host, port)
    stream = reader, writer
    try:
        async with asyncio.timeout(60):
            match kind:
                case "cut off":
                    return str((await post(stream, picture[: len(picture) // 2]))[0])
                case "text":
                    return str(
                        (
                            await post(
                                stream, b"hello " * 500, headers="Content-Type: text/plain\r\n"
                            )
                        )[0]
                    )
                case "empty":
                    return str((await post(stream, b""))[0])
                case "pixels":
                    return str((await post(stream, bombs["pixels"]))[0])
                case "bytes":
                    return str((await post(stream, bombs["bytes"]))[0])
                case "other type":
                    return str((await post(stream, b"{}", headers="Content-Encoding: gzip\r\n"))[0])
                case "form without an end":
                    body, headers = form([picture])(0)
                    return str((await post(stream, body[:-40], headers=headers))[0])
                case "huge headers":
                    writer.write(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 10**6)
                    return (await reader.read())[9:12].decode() or "closed"
                case "no HTTP":
                    writer.write(b"\x16\x03\x01\x02\x00 hello\r\n\r\n")
                    return (await reader.read())[9:12].decode() or "closed"
                case "slow":
                    writer.write(
                        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n"
                    )
                    for _ in range(30):
                        await asyncio.sleep(0.2)
                        writer.write(b"x")
                    return (await reader.read())[9:12].decode() or "closed"
                case _:  # "gone"
                    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(picture)}\r\n\r\n"
                    writer.write(head.encode() + picture)
                    await writer.drain()
                    return "gone"
    except (ConnectionError, asyncio.IncompleteReadError):
        return "closed"
    except TimeoutError:
        return "NO ANSWER"
    finally:
        writer.close()


BAD = (
    *("cut off", "text", "empty", "pixels", "bytes", "other type", "form without an end"),
    *("huge headers", "no HTTP", "slow", "gone"),
)


async def attack(
    host: str, port: int, number: int, said: dict[Path, tuple[str, float]], size: int
) -> dict:
    """Send the requests; return what became of them."""
    paths = [*said]
    contents = {path: path.read_bytes() for path in paths}
    bombs = {"pixels": bomb(20_000, 15_000), "bytes": bytes(size + 1)}
    todo = iter(range(number))
    rng = random.Random(0)
    counts = Counter[str]()
    memory = list[float]()
    wrong: list[str] = []
    furthest = 0.0

    async def client() -> None:
        nonlocal furthest
        stream = await asyncio.open_connection(host, port)
        for i in todo:
            path = rng.choice(paths)
            if i % 10 == 0:
                kind = BAD[i // 10 % len(BAD)]
                counts[f"{kind}: {await bad(kind, host, port, contents[path], bombs)}"] += 1
                stream[1].close()  # which may have been idle for too long by now
                stream = await asyncio.open_connection(host, port)
                continue
            status, content = await post(stream, contents[path])
            counts[f"good: {status}"] += 1
            if status != 200:
                wrong.append(f"{status} {content[:200]!r}")
                continue
            ((label, probability),) = labels(content)
            furthest = max(
                furthest, abs(probability - said[path][1]) if label == said[path][0] else 0.0
            )
            if label != said[path][0] and abs(probability - 0.5) > 0.02:
                wrong.append(f"{path}: {label} {probability}, predict says {said[path]}")
            if i in (number // 5 + 1, number - 1):
                memory.append(resident(await get(stream, "/metrics")))
        stream[1].close()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return {
        "counts": dict(counts),
        "wrong": wrong,
        "memory": memory,
        "furthest": round(furthest, 6),
    }


def predicted(run: str, pictures: Path) -> dict[Path, tuple[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/said.csv"
        subprocess.run(
            finetune("predict", run, str(pictures), "--output", output),
            check=True,
            capture_output=True,
        )
        with open(output, newline="") as file:
            return {
                Path(row["path"]): (row["class"], float(row["probability"]))
                for row in csv.DictReader(file)
            }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pictures", type=Path, required=True, help="folder of photographs")
    parser.add_argument("--checkpoint", required=True, help="a checkpoint, or a run's folder")
    parser.add_argument("--number", type=int, default=10_000)
    args = parser.parse_args()
    said = predicted(args.checkpoint, args.pictures)
    with serving(finetune("serve", args.checkpoint, "--port", "0", "--timeout", "5")) as (
        host,
        port,
        _,
    ):
        found = asyncio.run(attack(host, port, args.number, said, 32_000_000))
    for kind, count in sorted(found["counts"].items()):
        print(f"{count:6} {kind}")
    print(*found["wrong"][:20], sep="\n")
    early, late = found["memory"]
    good = found["counts"].get("good: 200", 0)
    told = (
        f"Of {args.number:,} requests by {CLIENTS} clients, a tenth bad, {good:,} good ones were answered and "
        f"{len(found['wrong'])} wrongly or not; the largest difference of a probability from `finetune predict` is "
        f"{found['furthest']:g}. The service's memory was {early:.0f} MB after a fifth of them and {late:.0f} MB at "
        f"the end ({100 * (late / early - 1):+.1f} %)."
    )
    print(told)
    record = {"about": "attack", "what": "attack", "told": told, **found, **where_and_when()}
    save(RECORDS, [*(r for r in records_of(RECORDS) if r["about"] != "attack"), record])


if __name__ == "__main__":
    main()
