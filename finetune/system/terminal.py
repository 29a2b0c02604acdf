"""The colours of a terminal, and output that can no longer be written.

A closed terminal also sends SIGHUP. In `finetune fit 2>&1 | tee log`, Ctrl-C ends `tee`, too.
"""

import io
import os
import select
import sys
from typing import TextIO

COLORS = {"red": 31, "yellow": 33}


def write_line(text: str, descriptor: int = 2) -> None:
    """Write a line to stderr (2) or stdout (1); without a reader it is lost. This is safe in a signal handler."""
    redirect_closed_outputs()
    try:
        os.write(descriptor, f"{text}\n".encode(errors="backslashreplace"))
    except OSError:  # the reader has just closed it, or its disk is full
        redirect_closed_outputs()


def redirect_closed_outputs() -> bool:
    """Redirect stdout and stderr to os.devnull if they are closed; return whether any was."""
    # `poll` always reports a closed terminal and a pipe without a reader.
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    gone = [
        descriptor
        for descriptor, events in poll.poll(0)
        if events & (select.POLLERR | select.POLLHUP)
    ]
    for descriptor in gone:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    return bool(gone)


def replace_unencodable() -> None:
    """Replace characters that the encoding of an output does not have, instead of ending with an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def is_interactive(stream: TextIO | None) -> bool:
    """Return whether a person watches: a terminal that can move its cursor, and no job of continuous integration.

    `CI` is set by every common service. Some of them run jobs on a pseudo-terminal and save what it shows as a log.
    """
    # a live bar of rich replaces the stream by one that always denies to be a terminal
    stream = getattr(stream, "rich_proxied_file", stream)
    if stream is None or not stream.isatty():
        return False
    return os.environ.get("TERM") not in ("dumb", "unknown") and not os.environ.get("CI")


def colored(text: str, color: str, stream: TextIO | None) -> str:
    """Return text in a color of `COLORS` on an interactive terminal, unless NO_COLOR is set (no-color.org)."""
    if not is_interactive(stream) or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{COLORS[color]}m{text}\x1b[0m"
