"""Output that may lose its reader: a terminal that closes, a pipe whose other end has gone. It is no reason to fail.

Nor is a log on a full disk: what is told on stderr is lost, training is not.

A closed terminal sends SIGHUP too, and `finetune fit 2>&1 | tee log` loses its `tee` to the same Ctrl-C.
"""

import errno
import io
import os
import select
import sys
from typing import Any


def write_line(text: str) -> None:
    """Write a line for the user, to whoever still reads; right in a signal handler too."""
    redirect_closed_outputs()
    try:
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))
    except OSError:
        redirect_closed_outputs()


def redirect_closed_outputs() -> bool:
    """Write to nowhere from now on where nobody reads any more; return whether that is so."""
    # A closed terminal, or a pipe without a reader, is told of without asking for anything.
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


class _Output(io.FileIO):
    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if error.errno == errno.EIO:
                redirect_closed_outputs()
            elif error.errno == errno.EPIPE or self.fileno() != 2:
                raise
            return len(content)


def outlive_terminal() -> None:
    """Go on when the terminal closes, as with `disown`, or the disk below stderr is full.

    Where SIGHUP is to end the command, it does; so does a pipe without a reader.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not None and (descriptor == 2 or stream.isatty()):
            stream.flush()
            file = io.BufferedWriter(_Output(descriptor, "w", closefd=False))
            text = io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True)
            setattr(sys, name, text)
