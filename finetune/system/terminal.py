"""Output that may be closed while a command runs: a closed terminal, or a pipe whose reader has exited.

The command continues. It also continues if stderr goes to a file on a full disk: its messages are lost, training is
not.

A closed terminal also sends SIGHUP. In `finetune fit 2>&1 | tee log`, Ctrl-C ends `tee`, too.
"""

import errno
import io
import os
import select
import sys
from typing import Any


def write_line(text: str) -> None:
    """Write a line to stderr, if it is still open. This is safe in a signal handler."""
    redirect_closed_outputs()
    try:
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))
    except OSError:
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
    """Continue when the terminal closes, as with `disown`, or when the disk of stderr is full.

    SIGHUP still ends the command if it is not ignored, and so does a pipe without a reader.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not None and (descriptor == 2 or stream.isatty()):
            stream.flush()
            file = io.BufferedWriter(_Output(descriptor, "w", closefd=False))
            text = io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True)
            setattr(sys, name, text)
