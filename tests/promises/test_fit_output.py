"""The output of a fit on a terminal, in a pipe and in a file, by the real command; in full: test_progress_output.py."""

import fcntl
import os
import pty
import re
import select
import struct
import termios
from pathlib import Path

import pytest
from colours import QUICKEST
from processes import Process

COLOR = re.compile(r"\x1b\[[0-9;]*(3[0-7]|9[0-7]|38;[25];[0-9;]*)m")
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HEADLINE = r"test accuracy \d+\.\d % \(\d+ of 30; 95 % interval \d+\.\d.\d+\.\d %\)"


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **changes}


def command(colours: Path) -> list[str]:
    words = ["--data.batch_size", "4", "--trainer.max_epochs", "2"]
    return ["finetune", "fit", str(colours), *QUICKEST, *words]


def shown(
    width: int, folder: Path, command: list[str], out: Path | None = None, **changes: str
) -> str:
    """Return what a command writes to a pseudo-terminal of this many columns; with `out`, its results go there."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    terminal = Path(os.ttyname(writer))
    process = Process(command, folder, environment(**changes), out or terminal, terminal)
    output = b""
    while True:
        has_ended = process.poll() is not None  # before the last look
        while select.select([reader], [], [], 0.02)[0]:
            output += os.read(reader, 65536)
        if has_ended:
            break
    os.close(reader)
    os.close(writer)
    assert process.returncode in (0, 2)
    return output.decode()


def lines_of(output: str) -> list[str]:
    """Return the lines that stay: of each, what is drawn last, without the codes."""
    kept = [line.rstrip("\r").split("\r")[-1] for line in output.split("\n")]
    return [CODES.sub("", line).rstrip() for line in kept]


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 40])
def test_a_fit_on_a_terminal_shows_a_bar_and_a_line_for_each_epoch(colours, tmp_path, width):
    output = shown(width, tmp_path, command(colours))
    lines = lines_of(output)
    # the bar, which goes away
    assert re.search(r"epoch 1/2", CODES.sub("", output))
    assert "\x1b[?25h" in output and COLOR.search(output)
    # the lines, which stay
    rows = [line for line in lines if re.match(r"epoch [12]/2  train/loss ", line)]
    assert len(rows) == 2
    assert all(len(re.findall(r"\d\.\d{4}\b", row)) == 3 for row in rows)
    assert width < 80 or re.search(HEADLINE, " ".join(" ".join(lines).split()))


@pytest.mark.slow
def test_a_fit_with_no_color_has_none_and_errors_are_red_without(tmp_path, colours):
    output = shown(80, tmp_path, command(colours), NO_COLOR="1")
    assert re.search(HEADLINE, output) and "epoch 2/2  train/loss" in CODES.sub("", output)
    assert not COLOR.search(output)
    assert "\x1b[31mfinetune: error: " in shown(80, tmp_path, ["finetune", "fit", "nowhere"])


EPOCH = r"^epoch 2/2  train/loss \d\.\d{4}  val/loss \d\.\d{4}  val/accuracy \d\.\d{4}"


@pytest.mark.slow
def test_a_fit_in_a_pipe_or_in_ci_has_plain_lines(colours, tmp_path):
    process = Process(command(colours), tmp_path, environment(FORCE_COLOR="1"))
    assert process.wait(300) == 0, process.stderr
    assert "\x1b" not in process.stdout + process.stderr and "─" not in process.stdout
    assert re.search(EPOCH, process.stderr, re.M) and re.search(HEADLINE, process.stdout, re.M)
    assert process.stdout.splitlines()[-1] == "next: finetune predict runs/fit/version_0 IMAGES"
    in_ci = "\n".join(lines_of(shown(80, tmp_path, command(colours), CI="true")))
    assert re.search(EPOCH, in_ci, re.M)


@pytest.mark.slow
def test_results_of_a_fit_go_to_a_file_while_the_bar_is_on_the_terminal(colours, tmp_path):
    """rich would redirect them to the bar's stream."""
    out = tmp_path / "out.txt"
    screen = shown(80, tmp_path, command(colours), out=out)
    assert "epoch 1/2" in CODES.sub("", screen) and "test/accuracy" not in screen
    assert re.search(rf"^{HEADLINE}\. Always predicting", out.read_text(), re.M)
