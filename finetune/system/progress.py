"""The progress of a long job and the time that is left: a bar on a terminal, elsewhere a line."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar

from rich.console import Console
from rich.progress import Progress

from finetune.system.terminal import is_interactive

# seconds of a job before a terminal gets a bar, and any other output a line
_QUIET = 2.0
_QUIET_LOG = 5.0
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
    """Yield items, and show the progress on stderr if it takes more than a few seconds.

    Args:
        items: The items; producing or processing them takes time. They may be produced in batches.
        num: The number of items.
        what: A short description of the job.
    """
    screen = console()
    progress = Progress(console=screen, transient=True, redirect_stdout=False)
    task = progress.add_task(what, total=num)
    began = time.monotonic()
    is_shown = False
    before = 0.0  # when the item before came
    processed = 0.0  # when it was processed
    try:
        for i, item in enumerate(items):
            elapsed = time.monotonic() - began
            # the items of a batch come at once, so the time so far is that of i items only before a new batch
            is_measured = i > 0 and elapsed - before >= processed / (2 * i)
            before = elapsed
            if screen.is_terminal and elapsed > _QUIET and not is_shown:
                progress.start()
                is_shown = True
            elif elapsed > _QUIET_LOG and is_measured and not is_shown:
                left = max(1, round(processed / i * (num - i)))
                print(
                    f"{what}: {i:,} of {num:,}, about {left:,} s left", file=sys.stderr, flush=True
                )
                is_shown = True
            yield item
            processed = time.monotonic() - began
            progress.advance(task)
    finally:
        if screen.is_terminal and is_shown:  # stopping a bar that was not started prints a line
            progress.stop()
