"""The progress of a long job: nothing if it is quick, one line in a log, a bar on a terminal."""

import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator

import pytest

from finetune.system import progress
from finetune.system.progress import duration, track


def test_durations_in_words():
    reported = ["0 s", "99 s", "1.7 minutes", "100.0 minutes", "1.7 hours"]
    assert [duration(s) for s in (0.4, 99.4, 100, 5999, 6000)] == reported


def test_items_come_through_and_what_is_quick_says_nothing(capsys):
    assert list(track(iter("abc"), 3, "letters")) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "")


class _Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def produce(self, num: int, batch_size: int, seconds: float) -> Iterator[int]:
        """Yield numbers, in batches of this size that take this many seconds each."""
        for i in range(num):
            if i % batch_size == 0:
                self.seconds += seconds
            yield i


@pytest.mark.parametrize(
    ("batches", "processing", "line"),
    [
        ((1, 2), 0, "letters: 2 of 96, about 188 s left\n"),
        ((1, 0), 2, "letters: 3 of 96, about 186 s left\n"),
        ((32, 8), 0, "letters: 32 of 96, about 16 s left\n"),  # not 760 s, as after one item
        ((96, 8), 0, ""),  # nothing is left
    ],
)
def test_a_log_gets_one_line_with_the_time_that_is_left(
    capsys, monkeypatch, batches, processing, line
):
    clock = _Clock()
    monkeypatch.setattr(progress, "time", clock)
    size, seconds = batches
    for _ in track(clock.produce(96, size, seconds), 96, "letters"):
        clock.seconds += processing
    assert capsys.readouterr() == ("", line)


def test_the_last_of_few_items_is_no_division_by_zero(capsys, monkeypatch):
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    assert list(track([7], 1, "numbers")) == [7] and capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_that_goes_away():
    reported = b""
    script = "from finetune.system import progress; import time; progress._QUIET = 0.1\n"
    script += "for _ in progress.track(range(4), 4, 'letters'): time.sleep(0.1)"
    reader, writer = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", script], stderr=writer)
    os.close(writer)
    while select.select([reader], [], [], 60)[0]:
        try:
            reported += os.read(reader, 4096)
        except OSError:  # the other end is closed
            break
    os.close(reader)
    assert child.wait(60) == 0 and b"letters" in reported and b"%" in reported
    assert reported.rstrip().endswith(b"\x1b[2K")  # the line is cleared
