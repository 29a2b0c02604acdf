"""Recognise a killed DataLoader worker. The error depends on when the main process notices it."""

import os
import re
import traceback


def is_killed_worker_error(error: BaseException) -> bool:
    """Return whether an error reports that a DataLoader worker was killed, or results from it."""
    other: BaseException | None = error
    # torch raises it in a signal handler, at any line: a library may have wrapped it in another error.
    while other is not None:
        if re.search("DataLoader worker .*(killed by signal|exited unexpectedly)", str(other)):
            return True
        other = other.__cause__ or other.__context__
    return _ended_during_handover(error)


def _ended_during_handover(error: BaseException) -> bool:
    """Return whether a worker ended while it transferred a batch."""
    if not isinstance(error, (EOFError, OSError)):
        return False
    paths = [
        frame.f_code.co_filename.split(os.sep)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    is_in_loader = any(path[-1] == "dataloader.py" for path in paths)
    is_in_transfer = is_in_loader and "multiprocessing" in paths[-1][-2:]
    return is_in_transfer or "in pin memory thread" in str(error)
