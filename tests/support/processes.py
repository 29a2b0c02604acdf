"""Several processes as torchrun would start them."""

import os
import socket
import subprocess
import sys
from pathlib import Path


def launch(script: str, out: Path, world_size: int, data: Path | str = "") -> Path:
    """Run a script of this folder as every rank of a world: `script OUT DATA WORLD_SIZE`; OUT gets their logs too."""
    out.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
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
            "OMP_NUM_THREADS": 1,
        }
        environment = {**os.environ, **{key: str(value) for key, value in launched.items() if world_size > 1}}
        command = [sys.executable, str(Path(__file__).with_name(script)), out, data, str(world_size)]
        with open(out / f"log{rank}", "w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=800) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world_size, "\n".join(path.read_text()[-3000:] for path in out.glob("log*"))
    return out
