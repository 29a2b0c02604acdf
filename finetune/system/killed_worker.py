"""How it shows that a process that reads pictures was killed: in errors of several kinds, by when it is noticed."""

import os
import re
import traceback


def is_killed_worker_error(error: BaseException) -> bool:
    """Return whether an error says that a worker of a DataLoader was killed, or comes of that."""
    other: BaseException | None = error
    # raised anywhere, since a signal brings the news: a library may have made another of it
    while other is not None:
        if re.search("DataLoader worker .*(killed by signal|exited unexpectedly)", str(other)):
            return True
        other = other.__cause__ or other.__context__
    return _ended_during_handover(error)


def _ended_during_handover(error: BaseException) -> bool:
    """Return whether a process ended while it handed over a batch."""
    if not isinstance(error, (EOFError, OSError)):
        return False
    paths = [
        frame.f_code.co_filename.split(os.sep)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    is_batch = any(path[-1] == "dataloader.py" for path in paths)
    return (is_batch and "multiprocessing" in paths[-1][-2:]) or "in pin memory thread" in str(
        error
    )
