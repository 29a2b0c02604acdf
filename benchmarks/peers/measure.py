"""Runs a command and measures it from outside: seconds, peak memory of all its processes, and its optimizer steps."""

import itertools
import os
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

CLOCK = Path(__file__).with_name("clock")
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


def run(command: Sequence[str], environment: Mapping[str, str], log: Path) -> dict:
    """Run a command and return its `seconds`, `cpu_seconds`, `memory_mb`, `output` and `stamps`.

    Args:
        command: Program and arguments.
        environment: Variables in addition to those of this process.
        log: Where the clock writes; must not exist.

    Returns:
        `cpu_seconds` is the processor time of all its processes. `stamps` are the seconds from the command to the end
        of each optimizer step.
    """
    path = os.pathsep.join(filter(None, [str(CLOCK), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, **environment, "PYTHONPATH": path, "COMPARE_CLOCK": str(log)}
    ended, peak = threading.Event(), [0]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        began = time.monotonic()
        cpu_before = cpu_of_children()
        # A session of its own, so that all its processes can be stopped.
        process = subprocess.Popen(
            command, env=variables, stdout=out, stderr=errors, start_new_session=True
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
    stamps = [float(line) - began for line in log.read_text().splitlines()] if log.exists() else []
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_of_children() - cpu_before,
        "memory_mb": peak[0] / 2**20,
        "output": texts[0],
        "stamps": stamps,
    }


def step_times(
    stamps: Sequence[float], num_epochs: int, num_images: int, batch_size: int
) -> dict[str, float]:
    """Return the seconds to the end of the first step, and those of a later epoch.

    Args:
        stamps: Seconds from the command to the end of each step.
        num_epochs: The steps are evenly divided among these.
        num_images: Images to train with; a peer may skip an incomplete batch.
        batch_size: Images in a full batch.

    Returns:
        `first_step`, and `later_seconds`: the median over the epochs after the first, each from the last step of the
        epoch before to its own last step, so with the evaluation and the checkpoint in between.
    """
    steps, rest = divmod(len(stamps), num_epochs)
    full, part = divmod(num_images, batch_size)
    if rest or not steps or steps not in (full, full + bool(part)):
        raise Failed(
            f"{len(stamps)} optimizer steps are not {num_epochs} epochs of {num_images} images"
        )
    ends = stamps[steps - 1 :: steps]
    later = statistics.median(end - start for start, end in itertools.pairwise(ends))
    return {"first_step": stamps[0], "later_seconds": later}
