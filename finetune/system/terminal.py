"""The width and colours of a terminal, and output that can no longer be written.

A closed terminal also sends SIGHUP. In `finetune fit 2>&1 | tee log`, Ctrl-C ends `tee`, too.
"""

import io
import os
import re
import select
import sys
import textwrap
from typing import TextIO

COLORS = {"red": 31, "yellow": 33}
# columns, below which lines are not wrapped; a pseudo-terminal without a size has 0
_NARROWEST = 20
# an option or command on a help page, with the spaces before its text
_OPTION = re.compile(r"  (--.{38} |\S+ {2,})(?=\S)")
_MIN_CONTINUED = 80  # columns; a shorter line of a description ends a paragraph


def write_line(text: str) -> None:
    """Write a line to stderr, if it is still open. This is safe in a signal handler."""
    redirect_closed_outputs()
    try:
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))
    except OSError:
        redirect_closed_outputs()


def print_if_read(text: str) -> None:
    """Print a line to stdout; without a reader it is lost, and the command continues."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
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


def wrapped(text: str, stream: TextIO | None, indent: str = "  ") -> str:
    """Return a line that is broken between words at the width of the terminal; unchanged if the stream is none.

    Args:
        text: The line.
        stream: Where it will be written.
        indent: Begins the second and further lines.
    """
    width = _width(stream)
    if width is None or width >= len(text):
        return text
    return _filled(text, width, indent)


def wrapped_page(page: str, stream: TextIO | None) -> str:
    """Return a help page with its long lines broken at the width of the terminal; unchanged if the stream is none.

    The text of an option continues below its beginning. The description at the top is filled again.
    """
    width = _width(stream)
    lines = page.splitlines()
    if width is None or width >= max(map(len, lines), default=0):
        return page
    result: list[str] = []
    is_paragraph_open = False  # whether the next line continues the last one
    is_description = True  # the options are indented
    for line in lines:
        is_description = is_description and not line.startswith(" ")
        if is_paragraph_open and line:
            result[-1] = f"{result[-1]} {line}"
        else:
            result.append(line)
        is_paragraph_open = is_description and len(line) > _MIN_CONTINUED
    return "\n".join(_filled(line, width, _hanging_indent(line, width)) for line in result)


def _hanging_indent(line: str, width: int) -> str:
    """Return the indent of the second and further lines into which a line of a help page is broken."""
    option = _OPTION.match(line)
    indent = option.end() if option else len(line) - len(line.lstrip())
    # a narrow terminal has no room below the text of an option
    return " " * (indent if width - indent >= _NARROWEST else 6)


def _filled(text: str, width: int, indent: str) -> str:
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _width(stream: TextIO | None) -> int | None:
    """Return the width of a terminal in columns; None if the stream is none, or does not state a usable width."""
    stream = getattr(stream, "rich_proxied_file", stream)
    if stream is None or not is_interactive(stream):
        return None
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return None
    return width if width >= _NARROWEST else None


def has_color(stream: TextIO | None) -> bool:
    """Return whether text may be coloured: on an interactive terminal, unless NO_COLOR is set (no-color.org)."""
    return is_interactive(stream) and not os.environ.get("NO_COLOR")


def colored(text: str, color: str, stream: TextIO | None) -> str:
    """Return text in a color of `COLORS` if the stream shows colors; unchanged otherwise."""
    return f"\x1b[{COLORS[color]}m{text}\x1b[0m" if has_color(stream) else text
