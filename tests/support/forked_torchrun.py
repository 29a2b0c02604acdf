"""`torchrun … -m finetune …` in a forked process: `forked_torchrun.py [--host NETWORK [--read-only FOLDER]] -- …`.

The processes that torchrun starts are forked from it, where it would start an interpreter for each, whose imports take
seconds. test_started_processes.py has torchrun itself. With a host, it runs in that network namespace, and the folder
is read-only for it.
"""

import argparse
import ctypes
import os
import subprocess
import sys
import time
from typing import Any
from unittest.mock import patch

from forked import Forked, run_forked, use_default_signals
from paths import ROOT
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from finetune.cli import main

CLONE_NEWNS, CLONE_NEWNET = 0x20000, 0x40000000  # of Linux: mounts, and the network


class ForkedRank(Forked):
    """Replaces the subprocess.Popen with which torchrun starts `python -u -m finetune …`."""

    def __init__(self, command: tuple[str, ...], environment: dict[str, str]) -> None:
        assert command[1:4] == ("-u", "-m", "finetune")
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os.environ.clear()
            os.environ.update(environment)
            use_default_signals()
            sys.argv = ["finetune", *command[4:]]
            run_forked(main)

    def wait(self, timeout: float = 600.0) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("finetune", timeout)
            time.sleep(0.01)
        return super().wait()


def enter(network: str) -> None:
    """Let this process and those that it starts be in a network namespace, with mounts of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{network}") as file:
        failed = libc.setns(file.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWNS)
    if failed:
        raise OSError(ctypes.get_errno(), "this process cannot enter a network namespace", network)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def make_read_only(folder: str) -> None:
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)


def popen(handler: SubprocessHandler, command: tuple[str, ...], env: dict[str, str]) -> Any:
    return ForkedRank(command, env)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--read-only")
    parser.add_argument("torchrun", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    sys.path.append(str(ROOT / "tests/nightly"))  # the callbacks of the tests
    if arguments.host:
        enter(arguments.host)
    if arguments.read_only:
        make_read_only(arguments.read_only)
    with patch.object(SubprocessHandler, "_popen", popen):
        run.main(arguments.torchrun[1:])
