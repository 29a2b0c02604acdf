"""Fork the processes that `processes.py` asks for; they start at once because the imports are done.

Each line of the input is a request, `["start", {...}]` or `["poll", pid]`. Each is answered by a line: the pid of the
new process, or its exit code (null while it runs). When the input ends, all processes of their sessions are killed.
"""

import contextlib
import gc
import json
import os
import runpy
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from forked import become_finetune, run_forked, use_default_signals

import finetune.inference.exporters

assert finetune.inference.exporters  # imported here, before a process is forked


def become(argv: list[str], environment: dict[str, str], folder: str, out: str, err: str) -> None:
    """Run a script, or the command `finetune`, in this forked process."""
    for stream, path in ((0, os.devnull), (1, out), (2, err)):
        # a terminal that became its own would lose what is last written to it
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOCTTY)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    name, *arguments = argv
    if name == "finetune":
        del sys.path[0]  # tests/support
        become_finetune(arguments)
    use_default_signals()
    sys.argv = argv
    sys.path[0] = os.path.dirname(name)
    runpy.run_path(name, run_name="__main__")


class Server:
    def __init__(self) -> None:
        self.codes: dict[int, int | None] = {}  # of each process ever started; None while it runs

    def start(self, process: dict[str, Any]) -> int:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.close(read)
            os.close(write)
            run_forked(partial(become, **process))
        os.close(write)
        os.read(read, 1)  # ends once the process leads a session, which can be killed as a whole
        os.close(read)
        self.codes[pid] = None
        return pid

    def poll(self, pid: int) -> int | None:
        if self.codes[pid] is None:
            ended, status = os.waitpid(pid, os.WNOHANG)
            self.codes[pid] = os.waitstatus_to_exitcode(status) if ended else None
        return self.codes[pid]

    def kill_all(self) -> None:
        """Kill every process that is left of the sessions."""
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ProcessLookupError):
                session = int(path.read_text().rpartition(") ")[2].split()[3])
                if session in self.codes:
                    os.kill(int(path.parent.name), signal.SIGKILL)


def main() -> None:
    # else each process's garbage collection would copy all the memory that it shares with this one
    gc.freeze()
    server = Server()
    try:
        for line in sys.stdin:
            request, argument = json.loads(line)
            print(
                json.dumps({"start": server.start, "poll": server.poll}[request](argument)),
                flush=True,
            )
    finally:
        server.kill_all()


if __name__ == "__main__":
    main()
