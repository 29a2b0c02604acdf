"""Processes of `finetune` that are forked from one that has imported everything, and so start at once."""

import atexit
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import NoReturn
from unittest.mock import patch

from pytorch_lightning.strategies.launchers import subprocess_script

import finetune.fitting.evaluate
import finetune.fitting.fit
from finetune.cli import main
from finetune.distributed import child_command
from finetune.runs import run_lock

# imported here, before a process is forked
assert finetune.fitting.evaluate and finetune.fitting.fit


def run_forked(function: Callable[[], object]) -> NoReturn:
    """Call a function in a forked process and exit as Python would: nothing ever returns to the parent's code."""
    code = 1
    weakref.finalize._registry.clear()  # type: ignore[attr-defined] # temporary folders of the parent
    # Those of the parent have buffers for its own files, and other ones are in their place now.
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    try:
        function()
        code = 0
    except SystemExit as error:
        code = exit_code(error)
    except BaseException:
        traceback.print_exc()
    try:
        threading._shutdown()  # type: ignore[attr-defined] # joins threads, as an interpreter does at its end
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def become_finetune(arguments: list[str]) -> None:
    """Run `finetune …` as a new process would, in a forked process, and exit.

    Processes for further devices and for the folds of a cross-validation are forked from this one, too, where an
    interpreter would be started for each.
    """
    use_default_signals()
    sys.argv = ["finetune", *arguments]
    fork_devices(main)
    patch.object(child_command, "subprocess", SimpleNamespace(Popen=ForkedCommand)).start()
    run_forked(main)


def fork_devices(program: Callable[[], object]) -> None:
    """Let the processes for further devices call a function, each in a fork of this process."""
    popen = partial(ForkedDevice, program)
    patch.object(subprocess_script, "subprocess", SimpleNamespace(Popen=popen)).start()


class Forked:
    """What subprocess.Popen offers of a forked process."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode


class ForkedDevice(Forked):
    """Stands for the subprocess.Popen with which Lightning starts another device's process."""

    def __init__(
        self,
        program: Callable[[], object],
        command: list[str],
        env: dict[str, str],
        cwd: str | None,
    ) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            _leave_folder_of_wandb()
            os.environ.clear()
            os.environ.update(env)
            use_default_signals()
            run_forked(program)


def _leave_folder_of_wandb() -> None:
    """Do not remove wandb's temporary folder at the end of this process: the importing process owns it."""
    media = sys.modules.get("wandb.sdk.data_types._private")
    if media is not None:
        atexit.unregister(media.MEDIA_TMP.cleanup)


class ForkedCommand(Forked):
    """Stands for the subprocess.Popen with which `child_command` starts `python -m finetune …`."""

    def __init__(
        self,
        command: list[str],
        env: dict[str, str],
        start_new_session: bool,
        cwd: str | None = None,
        pass_fds: Sequence[int] = (),  # a fork inherits all descriptors
    ) -> None:
        assert command[:3] == [sys.executable, "-m", "finetune"] and start_new_session
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os.chdir(cwd or ".")
            os.environ.clear()
            os.environ.update(env)
            run_lock._held.clear()  # locks stay with the process that holds them
            run_lock._inherited.clear()
            use_default_signals()
            sys.argv = ["finetune", *command[3:]]
            run_forked(main)


def use_default_signals() -> None:
    """Have the signal handlers with which a Python process begins."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
