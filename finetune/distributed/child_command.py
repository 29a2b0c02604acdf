"""Run a `finetune` command in a subprocess, and forward signals to it."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from finetune.distributed.ranks import PARENT
from finetune.distributed.signals import stop_at_once, stop_signals

# Lightning leaves these set in a process that has trained on several devices.
_RANKS = ("RANK", "LOCAL_RANK")


def start_command(arguments: Sequence[str], **options: Any) -> subprocess.Popen:
    """Start `finetune` with these arguments. The process ends when this process ends.

    Args:
        arguments: The command and its arguments.
        options: Further arguments of `subprocess.Popen`.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "finetune", *arguments],
        # A terminal would send Ctrl-C to both processes, and two of them mean "at once": only this process gets it.
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name not in _RANKS}
        | {PARENT: str(os.getpid())},
        **options,
    )


def wait_for(process: subprocess.Popen) -> int:
    """Wait for the end of a command, and return its exit code.

    Ctrl-C is forwarded, and so are the other stop signals that no handler of this process takes, as SIGTERM: a fit
    saves a checkpoint and stops. A second Ctrl-C stops it at once. Outside the main thread nothing is forwarded.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed.
        Interrupted: Another signal came.
    """
    unhandled = [signum for signum in stop_signals() if signal.getsignal(signum) == signal.SIG_DFL]
    try:
        for signum in unhandled:
            signal.signal(signum, stop_at_once)
        return process.wait()
    except BaseException as stop:
        signum = signal.SIGINT if isinstance(stop, KeyboardInterrupt) else signal.SIGTERM
        while process.poll() is None:
            try:
                process.send_signal(signum)
                process.wait()
            except KeyboardInterrupt:  # a second one is forwarded, too
                signum = signal.SIGINT
        raise
    finally:
        for signum in unhandled:
            signal.signal(signum, signal.SIG_DFL)
