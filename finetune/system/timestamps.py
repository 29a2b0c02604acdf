"""Begin each line of an output with the time."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, TextIO

_PARTS = re.compile(r"[^\r\n]+|\r|\n")


def stamped(line: str) -> str:
    """Return a line after the time in UTC, such as `2026-11-28T08:15:02Z `."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {line}"


class TimestampedStream:
    """A text stream that begins each line with the time, empty lines included.

    Text is written at once, even if the line has no end yet. Text after a carriage return replaces the line on a
    terminal, so it has a time of its own.

    Args:
        stream: Where the lines are written. Other attributes are those of this stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._has_time = False  # the line that is being written
        self._is_replaced = False  # by the text after a carriage return

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write text, and return its length without the times."""
        self.stream.write("".join(map(self._next, _PARTS.findall(text))))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def _next(self, part: str) -> str:
        """Return the next part of the stream, with the time if it needs one."""
        if part == "\r":
            self._is_replaced = True
            return part
        needs_time = not self._has_time or (self._is_replaced and part != "\n")
        self._has_time = part != "\n"
        self._is_replaced = False
        return stamped(part) if needs_time else part
