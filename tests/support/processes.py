"""Several processes as torchrun would start them."""

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

LIMIT = 800  # seconds


def launch(script: str, out: Path, world_size: int, data: Path | str = "") -> Path:
    """Run a script of this folder as every rank of a world: `script OUT DATA WORLD_SIZE`; OUT gets their logs too."""
    out.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(world_size):
        launched = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "GROUP_RANK": 0,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": "test",
        }
        more = {key: str(value) for key, value in launched.items() if world_size > 1}
        ranks.append(({**os.environ, **more}, str(out / f"log{rank}")))
    path = str(Path(__file__).with_name(script))
    codes = _ask([path, [str(out), str(data), str(world_size)], ranks])
    assert codes == [0] * world_size, "\n".join(path.read_text()[-3000:] for path in out.glob("log*"))
    return out


def _ask(request: list) -> list[int]:
    """Return the exit codes of ranks."""
    server = _server()
    assert server.stdin and server.stdout
    codes = []
    try:
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        if select.select([server.stdout], [], [], LIMIT)[0]:
            codes = json.loads(server.stdout.readline())
    finally:
        if not codes:  # stopped, or too late: the ranks, too
            _end(server)
            _server.cache_clear()
    return codes


@cache
def _server() -> subprocess.Popen:
    """Return the process of which ranks are forked, one for all tests of this process."""
    command = [sys.executable, Path(__file__).with_name("rank_server.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
    for stream in (server.stdin, server.stdout):
        if stream:
            stream.close()
