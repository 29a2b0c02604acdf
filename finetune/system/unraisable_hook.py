"""What is raised where Python can't raise it, as while it collects garbage: a stop is not lost there, a worker no news.

The handlers of signals run wherever the main thread is. In a `__del__` Python prints what they raise, and goes on.
"""

import os
import sys
import threading
from typing import Any

# A worker that was killed after its last batch; an iterator that a stop met half made, while its workers started.
_IGNORED = ("DataLoader worker", "'_MultiProcessingDataLoaderIter' object has no attribute")


def install_unraisable_hook() -> None:
    """Decide what becomes of it in this process."""
    sys.unraisablehook = _handle


def _handle(unraisable: Any) -> None:
    error = unraisable.exc_value
    code = (
        130
        if isinstance(error, KeyboardInterrupt)
        else getattr(error, "exit_code", getattr(error, "code", 0))
    )
    # `Interrupted` or our SystemExit: the signal comes once more
    if isinstance(code, int) and code > 128:
        threading.Timer(0.01, os.kill, (os.getpid(), code - 128)).start()
    elif not any(words in str(error) for words in _IGNORED):
        sys.__unraisablehook__(unraisable)
