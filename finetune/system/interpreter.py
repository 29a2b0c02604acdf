"""Settings of the Python interpreter of a command: garbage collection, and exceptions that cannot be raised."""

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

# A worker that was killed after its last batch, and an iterator that a stop has interrupted while workers started.
_IGNORED = ("DataLoader worker", "'_MultiProcessingDataLoaderIter' object has no attribute")


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Disable garbage collection, for imports: they create no garbage, but Python would run the collector often.

    Importing torch, Lightning and albumentations takes 4.2 s with it and 3.0 s without (2 cores AMD EPYC).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
