"""Progress of a long job: a bar on a terminal, one line elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

# seconds before the bar, and before the line, is shown
_QUIET, _QUIET_LOG = 2.0, 5.0
_T = TypeVar("_T")


def duration(seconds: float) -> str:
    """Return a duration as text, rounded, such as `12 s` or `3.5 minutes`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 6000 else f"{seconds / 3600:.1f} hours"


def track(items: Iterable[_T], num: int, what: str) -> Iterator[_T]:
    """Yield items, and show the progress on stderr if it takes more than a few seconds.

    Args:
        items: The items; producing or processing them takes time.
        num: The number of items.
        what: A short description of the job.
    """
    console = Console(stderr=True)
    progress = Progress(console=console, transient=True)
    task = progress.add_task(what, total=num)
    began = time.monotonic()
    is_shown = False
    try:
        for i, item in enumerate(items):
            passed = time.monotonic() - began
            if console.is_terminal and passed > _QUIET and not is_shown:
                progress.start()
                is_shown = True
            elif passed > _QUIET_LOG and i and not is_shown:
                left = max(1, round(passed / i * (num - i)))
                print(
                    f"{what}: {i:,} of {num:,}, about {left:,} s left", file=sys.stderr, flush=True
                )
                is_shown = True
            yield item
            progress.advance(task)
    finally:
        if (
            console.is_terminal and is_shown
        ):  # stopping a bar that was not started prints an empty line
            progress.stop()
