"""Runs a command and measures it from outside: seconds, CPU seconds and peak memory of all its processes."""

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_LIMIT = 3600  # seconds


class Failed(Exception):
    """A command that ended with an error; the text is its last line."""


def descendants(pid: int) -> list[int]:
    """Return a process and all that it started, directly or not."""
    found = [pid]
    for parent in found:
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(child) for child in path.read_text().split()]
            except OSError:  # ended meanwhile
                continue
    return found


def proportional_bytes(pid: int) -> int:
    """Return the memory of a process; what it shares with others is divided among them, so that a sum is true."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def cpu_of_children() -> float:
    """Return the processor seconds of the processes that this one started and that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def watch_memory(pid: int, ended: threading.Event, peak: list[int]) -> None:
    pause = 0.5
    while not ended.wait(pause):
        began = time.thread_time()
        peak[0] = max(peak[0], sum(map(proportional_bytes, descendants(pid))))
        # a fiftieth of a core: the system counts page by page
        pause = max(0.5, 50 * (time.thread_time() - began))


def run(command: Sequence[str], environment: Mapping[str, str]) -> dict:
    """Run a command and return its `seconds`, `cpu_seconds` and `memory_mb`, of all its processes, and its `output`.

    Args:
        command: Program and arguments.
        environment: Variables in addition to those of this process.
    """
    ended, peak = threading.Event(), [0]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        began = time.monotonic()
        cpu_before = cpu_of_children()
        # A session of its own, so that all its processes can be stopped.
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=out,
            stderr=errors,
            start_new_session=True,
        )
        watcher = threading.Thread(target=watch_memory, args=(process.pid, ended, peak))
        watcher.start()
        try:
            code = process.wait(timeout=_LIMIT)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        finally:
            seconds = time.monotonic() - began
            ended.set()
            watcher.join()
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read())
    if code:
        lines = "\n".join(texts).strip().splitlines()
        raise Failed(lines[-1].strip() if lines else f"exit code {code}")
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_of_children() - cpu_before,
        "memory_mb": peak[0] / 2**20,
        "output": texts[0],
    }
