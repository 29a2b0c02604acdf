"""Handle exceptions that Python cannot raise, such as those in `__del__`.

Signal handlers run wherever the main thread is. If this is in a `__del__`, Python prints the exception of the handler
and continues: a stop would be lost.
"""

import os
import sys
import threading
from typing import Any

# A worker that was killed after its last batch, and an iterator that a stop has interrupted while workers started.
_IGNORED = ("DataLoader worker", "'_MultiProcessingDataLoaderIter' object has no attribute")


def install_unraisable_hook() -> None:
    """Install `sys.unraisablehook`: repeat the signal of a lost stop, and hide harmless errors of DataLoaders."""
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
