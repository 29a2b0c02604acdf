"""The progress of a long job: a bar on a terminal, elsewhere a line."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar

from rich.console import Console
from rich.progress import Progress

from finetune.system.terminal import is_interactive

_QUIET = 5.0  # seconds of a job before a line says how far it is
_T = TypeVar("_T")


def console(stream: TextIO | None = None) -> Console:
    """Return a console on stderr, or on another stream, that draws only on an interactive terminal.

    With FORCE_COLOR rich itself would also draw in a pipe.
    """
    target = sys.stderr if stream is None else stream
    return Console(
        file=stream, stderr=stream is None, force_terminal=is_interactive(target), highlight=False
    )


def clock(seconds: float) -> str:
    """Return a duration as `0:07`, `12:30` or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """Return a duration as text, rounded, such as `12 s` or `3.5 minutes`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 6000 else f"{seconds / 3600:.1f} hours"


def track(items: Iterable[_T], num: int, what: str) -> Iterator[_T]:
    """Yield items, and show the progress: a bar on a terminal, elsewhere a line if it takes more than a few seconds.

    Args:
        items: The items; producing or processing them takes time.
        num: The number of items.
        what: A short description of the job.
    """
    screen = console()
    if screen.is_terminal:
        with Progress(console=screen, transient=True, redirect_stdout=False) as progress:
            yield from progress.track(items, num, description=what)
        return
    began = time.monotonic()
    is_shown = False
    for i, item in enumerate(items):
        if not is_shown and time.monotonic() - began > _QUIET:
            print(f"{what}: {i:,} of {num:,} so far", file=sys.stderr, flush=True)
            is_shown = True
        yield item
