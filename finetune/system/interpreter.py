"""Settings of the Python interpreter of a command: UTF-8 whatever the locale, and exceptions that cannot be raised."""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

_PROGRAMS = ("finetune", "__main__")  # the console script, and `python -m finetune`
# A worker that was killed after its last batch, and an iterator that a stop has interrupted while workers started.
_IGNORED = ("DataLoader worker", "'_MultiProcessingDataLoaderIter' object has no attribute")


def enter_utf8_mode() -> None:
    """Start the interpreter of a `finetune` command again in UTF-8 mode if the locale has another encoding.

    Otherwise Python decodes file names and arguments by the locale, and cannot print others. From Python 3.15 on the
    mode is the default (PEP 686). The process stays the same, and so do its number, its arguments and its open files.
    """
    is_utf8 = sys.flags.utf8_mode or sys.getfilesystemencoding() == "utf-8"
    if is_utf8 or not sys.executable or Path(sys.argv[0]).stem not in _PROGRAMS:
        return
    os.environ["PYTHONUTF8"] = "1"  # for the processes that this one starts
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def install_unraisable_hook() -> None:
    """Install `sys.unraisablehook`: send a lost stop signal again, and hide harmless errors of DataLoaders.

    A signal handler runs wherever the main thread is. If that is in a `__del__`, Python prints the handler's exception
    and continues, so the stop would be lost.
    """
    sys.unraisablehook = _handle


def _handle(unraisable: Any) -> None:
    error = unraisable.exc_value
    if signum := _stop_signal(error):
        threading.Timer(0.01, os.kill, (os.getpid(), signum)).start()
    elif not any(words in str(error) for words in _IGNORED):
        sys.__unraisablehook__(unraisable)


def _stop_signal(error: BaseException | None) -> int:
    """Return the signal whose handler raised an error; 0 if it was another error."""
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    # the exit code of `Interrupted`, or of the SystemExit of our handler
    code = getattr(error, "exit_code", getattr(error, "code", 0))
    return code - 128 if isinstance(code, int) and code > 128 else 0
