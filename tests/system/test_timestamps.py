"""Lines that begin with the time, written in pieces, and the same in processes whose outputs are pipes or terminals."""

import io
import logging
import os
import pty
import random
import re
import sys

import pytest
from test_terminal import code_of

from finetune.cli import main
from finetune.system.terminal import stamp_outputs, write_line
from finetune.system.timestamps import TimestampedStream, stamped

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ")


class StampedWrites(TimestampedStream):
    """The control: each write has a time, but not each line."""

    def write(self, text: str) -> int:
        return self.stream.write(stamped(text))


def written(kind: type[TimestampedStream], text: str, chooser: random.Random) -> str:
    """Return what is written of a text that arrives in pieces."""
    target = io.StringIO(newline="")
    stream = kind(target)
    while text:
        size = chooser.randint(1, 4)
        stream.write(text[:size])
        text = text[size:]
    return target.getvalue()


def has_times(output: str, text: str) -> bool:
    """Return whether the output is a text with a time at each line, and at each text after a carriage return."""
    lines = output.split("\n")[: text.count("\n")]
    pieces = [piece for piece in re.split("[\r\n]", output) if piece]
    return (
        TIME.sub("", output) == text
        and all(map(TIME.search, lines))
        and all(len(TIME.findall(piece)) == 1 and TIME.match(piece) for piece in pieces)
    )


def test_each_line_has_one_time_however_it_is_written():
    chooser = random.Random(0)
    texts = ["".join(chooser.choices("ab\n\r", (4, 4, 3, 1), k=40)) for _ in range(200)]
    for text in [*texts, "\r 10%\r 20%\n", "a\r\n\r\n"]:
        assert has_times(written(TimestampedStream, text, chooser), text), text
    # the control
    assert not has_times(written(StampedWrites, "abc\ndef\n", chooser), "abc\ndef\n")


def print_lines() -> int:
    logging.root.addHandler(logging.StreamHandler())
    stamp_outputs()
    stamp_outputs()  # not twice
    logging.root.warning("logged")
    print("on stdout", flush=True)
    print("in", end="", file=sys.stderr)
    write_line("\na signal")
    print("pieces", file=sys.stderr)
    return 7


def test_pipes_have_times_and_terminals_have_none():
    code, output = code_of(print_lines, os.pipe())
    lines = output.decode().splitlines()
    assert code == 7
    assert sorted(TIME.sub("", line) for line in lines) == [
        "a signal",
        "inpieces",
        "logged",
        "on stdout",
    ]
    assert all(map(TIME.match, lines))
    # the control
    assert not TIME.search(code_of(print_lines, pty.openpty())[1].decode())


def test_a_closed_pipe_ends_a_command_with_times_as_any():
    def print_much() -> int:
        stamp_outputs()
        for _ in range(3):
            print("much", flush=True)
        return 7

    code, _ = code_of(print_much, os.pipe(), closes=True)
    assert os.strerror(code) == "Broken pipe"


def test_errors_have_times_and_a_config_on_stdout_has_none(capsys, tmp_path):
    before = sys.stdout, sys.stderr
    with pytest.raises(SystemExit):
        main(["fit", str(tmp_path / "none"), "--timestamps"])
    error = capsys.readouterr().err
    assert TIME.match(error) and "does not exist" in error and error.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["fit", str(tmp_path), "--timestamps", "--print_config"])
    assert "timestamps: true" in capsys.readouterr().out.splitlines()
    assert (sys.stdout, sys.stderr) == before
