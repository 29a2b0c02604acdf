"""The line of a long job in a log, with the time that is left; on a terminal: test_downloads.py."""

import time

import pytest

from finetune.system.progress import track


@pytest.mark.parametrize(
    ("num", "batch_size", "seconds", "processing", "line"),
    [
        (96, 1, 2, 0, "letters: 2 of 96, about 188 s left\n"),
        (96, 1, 0, 2, "letters: 3 of 96, about 186 s left\n"),
        (96, 32, 8, 0, "letters: 32 of 96, about 16 s left\n"),  # not 760 s, as after one item
        (96, 96, 8, 0, ""),  # nothing is left
        (1, 1, 20, 0, ""),
        (96, 1, 0.01, 0, ""),  # quick
    ],
)
def test_a_log_gets_one_line_with_the_time_that_is_left(
    capsys, monkeypatch, num, batch_size, seconds, processing, line
):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def produced():
        for i in range(num):
            now[0] += seconds * (i % batch_size == 0)
            yield i

    seen = []
    for item in track(produced(), num, "letters"):
        seen.append(item)
        now[0] += processing
    assert seen == list(range(num)) and capsys.readouterr() == ("", line)
