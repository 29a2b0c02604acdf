"""The line of a long job in a log; on a terminal: test_downloads.py."""

import time

import pytest

from finetune.system.progress import track


@pytest.mark.parametrize(("seconds", "line"), [(2, "letters: 2 of 96 so far\n"), (0.01, "")])
def test_a_log_gets_one_line_of_a_long_job(capsys, monkeypatch, seconds, line):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def produced():
        for i in range(96):
            now[0] += seconds
            yield i

    assert list(track(produced(), 96, "letters")) == list(range(96))
    assert capsys.readouterr() == ("", line)
