"""Run commands and scripts in processes that start within milliseconds: a server forks them.

A new interpreter imports torch, Lightning and the rest for three to five seconds of a core. `rank_server.py` imports
them once for all tests of a pytest process. A forked process differs from a new one: variables that are read at import
(such as RANK by Lightning, or PYTHONPATH) come too late, and all forks share one hash seed. Tests of such things, and
of how an interpreter starts (console script, `python -m finetune`, torchrun), start a real one.
"""

import atexit
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LIMIT = 800  # seconds
GRACE = 20.0  # seconds for the other ranks once one has failed
_numbers = itertools.count()
_lock = threading.Lock()


class Process:
    """A forked process of `finetune …` or of a script, the leader of its session."""

    def __init__(
        self,
        argv: list[str],
        cwd: Path,
        environment: dict[str, str],
        out: Path | None = None,
        err: Path | None = None,
    ) -> None:
        number = next(_numbers)
        self.out = out or _outputs() / f"out{number}"
        self.err = err or _outputs() / f"err{number}"
        self.returncode: int | None = None
        how = {
            "argv": argv,
            "environment": environment,
            "folder": str(cwd),
            "out": str(self.out),
            "err": str(self.err),
        }
        self.pid: int = _ask("start", how)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = _ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float = LIMIT) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"a process still ran after {timeout} s: {self.stderr[-3000:]}")
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Send a signal to this process alone."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def send_signal_to_all(self, signum: int) -> None:
        """Send a signal as a terminal does: to this process and to those that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)

    def kill(self) -> None:
        self.send_signal_to_all(signal.SIGKILL)

    @property
    def stdout(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    @property
    def stderr(self) -> str:
        return self.err.read_text() if self.err.exists() else ""


def start(*arguments: object, cwd: Path, **environment: str) -> Process:
    """Start `finetune …` in a folder."""
    return Process(
        ["finetune", *map(str, arguments)],
        cwd,
        {**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def finetune(*arguments: object, cwd: Path, timeout: float = 300, **environment: str) -> Process:
    """Run `finetune …` in a folder to its end."""
    process = start(*arguments, cwd=cwd, **environment)
    process.wait(timeout)
    return process


def forked_subprocess() -> SimpleNamespace:
    """Return what stands for `subprocess` in a module that starts `python -m finetune …`: it forks the command."""

    def popen(command: list[str], **_: object) -> Process:
        assert command[:3] == [sys.executable, "-m", "finetune"]
        return start(*command[3:], cwd=Path.cwd())

    def run(command: list[str], **_: object) -> Process:
        process = popen(command)
        process.wait()
        return process

    return SimpleNamespace(Popen=popen, run=run, DEVNULL=subprocess.DEVNULL)


def start_script(script: Path, *arguments: object, cwd: Path) -> Process:
    """Start a Python script in a folder."""
    return Process([str(script), *map(str, arguments)], cwd, dict(os.environ))


def run_script(script: Path, *arguments: object, cwd: Path, timeout: float = 300) -> Process:
    """Run a Python script in a folder to its end."""
    process = start_script(script, *arguments, cwd=cwd)
    process.wait(timeout)
    return process


def launch(script: str, out: Path, world_size: int, data: Path | str = "", *more: str) -> Path:
    """Run a script of this folder as every rank of a world: `script OUT DATA WORLD_SIZE …`; OUT gets their logs too."""
    out.mkdir()
    argv = [str(Path(__file__).with_name(script)), str(out), str(data), str(world_size), *more]
    port = free_port()
    ranks: list[Process] = []
    deadline = time.monotonic() + LIMIT
    try:
        for rank in range(world_size):
            environment = dict(os.environ)
            if world_size > 1:
                environment |= rank_environment(rank, world_size, port)
            log = out / f"log{rank}"
            ranks.append(Process(argv, Path.cwd(), environment, log, log))
        while None in (codes := [rank.poll() for rank in ranks]) and time.monotonic() < deadline:
            if any(codes):
                deadline = min(deadline, time.monotonic() + GRACE)
            time.sleep(0.01)
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * world_size, "\n".join(
        path.read_text()[-3000:] for path in out.glob("log*")
    )
    return out


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for one process of several on this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
    }


def start_ranks(
    world_size: int, *arguments: object, cwd: Path, **environment: str
) -> list[Process]:
    """Start `finetune …` as several ranks, as torchrun does: none is forked from another one."""
    port = free_port()
    return [
        start(*arguments, cwd=cwd, **environment, **rank_environment(rank, world_size, port))
        for rank in range(world_size)
    ]


def processes_of(sessions: Iterable[int]) -> list[str]:
    """Return what still runs of these sessions."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().rpartition(") ")
        except OSError:  # it has just ended
            continue
        state, parent, _, session = rest.split()[:4]
        if int(session) in sessions and state not in "ZX":
            found.append(f"{path.parent.name} ({name.partition('(')[2]}), child of {parent}")
    return found


def left_after(sessions: list[int], seconds: float) -> list[str]:
    """Return what still runs of these sessions after some seconds; sooner if nothing does.

    The kernel ends a killed process some milliseconds after the one that kills it may have ended.
    """
    deadline = time.monotonic() + seconds
    while (left := processes_of(sessions)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _ask(request: str, argument: Any) -> Any:
    with _lock:
        server = _server()
        assert server.stdin and server.stdout
        answer = ""
        try:
            server.stdin.write(json.dumps([request, argument]) + "\n")
            server.stdin.flush()
            answer = server.stdout.readline()
        finally:
            # it has ended, or this was interrupted: its answer would be taken for the next one's
            if not answer:
                _end(server)
                _server.cache_clear()
        if not answer:
            raise RuntimeError(f"the server of processes ended with code {server.returncode}")
        return json.loads(answer)


@cache
def _outputs() -> Path:
    """Return the folder for the output of processes."""
    folder = Path(tempfile.mkdtemp(prefix="processes"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _server() -> subprocess.Popen[str]:
    """Return the server, one for all tests of this process."""
    server = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("rank_server.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    if server.stdin:
        with contextlib.suppress(OSError):
            server.stdin.close()  # it kills what still runs, and ends
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    if server.stdout:
        server.stdout.close()
