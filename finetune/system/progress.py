"""How far a long job is, and how long it will take: a bar on a terminal, elsewhere a line."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

# seconds before a bar is shown, and a line where there is no terminal
_QUIET, _QUIET_LOG = 2.0, 5.0
_T = TypeVar("_T")


def duration(seconds: float) -> str:
    """Return about how long that is, in words."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 6000 else f"{seconds / 3600:.1f} hours"


def track(items: Iterable[_T], num: int, what: str) -> Iterator[_T]:
    """Yield items; once that takes long, say on stderr how far they are.

    Args:
        items: What takes time to come, or to be dealt with.
        num: How many they are.
        what: What is done with them, in words.
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
                    f"{what}: {i:,} of {num:,}, about {left:,} s to go", file=sys.stderr, flush=True
                )
                is_shown = True
            yield item
            progress.advance(task)
    finally:
        if console.is_terminal and is_shown:  # else it would leave an empty line
            progress.stop()
