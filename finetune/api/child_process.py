"""Run `finetune fit` in a subprocess, for a fit on several devices.

Lightning starts the other ranks by running the script of rank 0 again, or by forking. From a notebook, or from a script
without `if __name__ == "__main__"`, this would run the user's code again, or wait for threads that a fork does not
have.
"""

import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from torch import cuda

from finetune.distributed.child_command import start_command, wait_for
from finetune.distributed.launch import count_devices, has_launcher
from finetune.runs.local_copies import local_root
from finetune.system.messages import WrongUsage

_RUN = re.compile(r"run in (.+)")
_ERROR = "finetune: error: "


def needs_processes(devices: object, num_nodes: int, accelerator: object, strategy: object) -> bool:
    """Return whether the fit would run in other processes than this one."""
    if has_launcher():
        return False  # a launcher has started them already
    try:
        num = count_devices(devices)
    except ValueError:  # Lightning reports the error
        return False
    if num is None and accelerator in ("auto", "gpu", "cuda"):
        num = cuda.device_count()
    return (num or 1) > 1 or num_nodes > 1 or strategy not in ("auto", None)


def run_command(arguments: Sequence[str]) -> Path:
    """Run `finetune` with these arguments, forward its output, and return the folder of its run.

    Ctrl-C, and other signals that would end this process, are forwarded: the fit saves a checkpoint and stops. A second
    Ctrl-C stops it at once. The subprocess ends when this process ends.

    Raises:
        ValueError: The command failed with an error message of one line.
        RuntimeError: The command failed in another way.
        KeyboardInterrupt: Ctrl-C was pressed.
        Interrupted: Another signal came.
    """
    process = start_command(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="surrogateescape",
    )
    assert process.stdout is not None and process.stderr is not None
    lines: list[str] = []
    readers = [
        threading.Thread(target=_forward, args=(source, target, lines), daemon=True)
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    ]
    for reader in readers:
        reader.start()
    try:
        wait_for(process)
    finally:
        for reader in readers:
            reader.join()
        process.stdout.close()
        process.stderr.close()
    return _run_of(process.returncode, lines)


def _run_of(code: int, lines: list[str]) -> Path:
    """Return the run's folder from the output of the command, or raise the error that ended it."""
    if code:
        reason = next(
            (line.removeprefix(_ERROR) for line in reversed(lines) if line.startswith(_ERROR)), None
        )
        if reason is None:
            raise RuntimeError(f"finetune fit ended with code {code}: see its output above")
        raise WrongUsage(reason) if code == 2 else ValueError(reason)
    runs = (local_root(match[1]) for line in reversed(lines) if (match := _RUN.fullmatch(line)))
    if (run := next(runs, None)) is None:
        raise RuntimeError("finetune fit has not reported the folder of its run")
    return run


def _forward(source: IO[str], target: IO[str] | None, lines: list[str]) -> None:
    """Forward lines as they come, and append them to `lines`."""
    for line in source:
        lines.append(line.rstrip("\n"))
        if target is None:
            continue
        encoding = getattr(target, "encoding", None) or "utf-8"
        shown = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        try:
            target.write(shown.encode(encoding, "replace").decode(encoding))
            target.flush()
        except (OSError, ValueError):  # nobody reads the output
            target = None  # continue to read, or the subprocess would block
