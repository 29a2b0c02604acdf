"""Output without a reader, by real terminals and pipes in forked processes."""

import errno
import os
import pty
import sys
from collections.abc import Callable

import pytest

from finetune.system.terminal import write_line

Screen = tuple[int, int]  # where is read, where is written


def code_of(act: Callable[[], int], screen: Screen, closes: bool = False) -> tuple[int, bytes]:
    """Return how a process ends that writes to a screen, which it `closes` itself before, and what is read there."""
    (reader, writer), (waits, lets) = screen, os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            os.close(writer)
            sys.stdout, sys.stderr = (os.fdopen(fd, "w", 1, closefd=False) for fd in (1, 2))
            if closes:
                os.close(reader)
            os.close(lets)
            os.read(waits, 1)  # until the other process has closed it too
            code = act()
        except OSError as error:
            code = error.errno
        finally:
            os._exit(code)
    os.close(writer)
    if closes:
        os.close(reader)
    os.close(lets)
    os.close(waits)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    read = b"" if closes else os.read(reader, 1000)
    if not closes:
        os.close(reader)
    return code, read


def print_much() -> int:
    for _ in range(3):
        print("much", file=sys.stderr)
        print("much", flush=True)
    return 7


def reported() -> int:
    write_line("one line")
    return 7


def test_a_pipe_without_a_reader_still_ends_a_command_that_prints():
    assert code_of(print_much, os.pipe(), closes=True)[0] == errno.EPIPE  # `finetune cache | head`


def test_a_service_outlives_the_reader_of_its_output():
    def announce() -> int:
        write_line("serving", 1)
        write_line("still serving", 1)
        return 7

    assert code_of(announce, os.pipe(), closes=True)[0] == 7
    assert code_of(announce, os.pipe())[0] == 7
    assert code_of(print_much, os.pipe(), closes=True)[0] == errno.EPIPE  # the control


@pytest.mark.parametrize("make", [os.pipe, pty.openpty])
def test_output_needs_no_reader(make):
    assert code_of(reported, make(), closes=True)[0] == 7
