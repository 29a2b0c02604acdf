"""Settings of the Python interpreter of a command: UTF-8 whatever the locale, and exceptions that cannot be raised."""

import os
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
    """Install `sys.unraisablehook`: repeat the signal of a lost stop, and hide harmless errors of DataLoaders.

    Signal handlers run wherever the main thread is. If this is in a `__del__`, Python prints the exception of the
    handler and continues: a stop would be lost.
    """
    sys.unraisablehook = _handle


def _handle(unraisable: Any) -> None:
    error = unraisable.exc_value
    code = (
        130
        if isinstance(error, KeyboardInterrupt)
        else getattr(error, "exit_code", getattr(error, "code", 0))
    )
    # `Interrupted`, or the SystemExit of our handler: send the signal again
    if isinstance(code, int) and code > 128:
        threading.Timer(0.01, os.kill, (os.getpid(), code - 128)).start()
    elif not any(words in str(error) for words in _IGNORED):
        sys.__unraisablehook__(unraisable)
