"""Forks what `processes.launch` starts: ranks begin at once where all that they import is there."""

import gc
import json
import os
import runpy
import sys
import traceback

import finetune.commands.lightning_cli
import finetune.inference.exporters


def be_rank(script: str, arguments: list[str], environment: dict[str, str], log: str) -> None:
    """Run a script as a process of its own would, and end."""
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [script, *arguments]
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    assert finetune.commands.lightning_cli and finetune.inference.exporters  # imported before forking
    gc.freeze()  # else each rank's garbage collection would copy all the memory that it shares with this process
    for line in sys.stdin:
        script, arguments, ranks = json.loads(line)
        pids = []
        for environment, log in ranks:
            pid = os.fork()
            if pid == 0:
                be_rank(script, arguments, environment, log)
            pids.append(pid)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)


if __name__ == "__main__":
    main()
