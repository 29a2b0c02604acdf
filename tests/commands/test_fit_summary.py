"""The output of a fit on a terminal and in a pipe, by the real command on pseudo-terminals of two widths."""

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

from finetune.training.progress_bar import EpochTable

COLOR = re.compile(r"\x1b\[[0-9;]*(3[0-7]|9[0-7]|38;[25];[0-9;]*)m")
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
FIT = [*QUICKEST, "--data.batch_size", "4"]
HEADLINE = r"test accuracy \d+\.\d % \(\d+ of 30; 95 % interval \d+\.\d.\d+\.\d %\)"


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **changes}


def shown(
    width: int, folder: Path, *arguments: object, out: Path | None = None, **changes: str
) -> str:
    """Return what a command writes to a pseudo-terminal of this many columns; with `out`, its results go there."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    terminal = Path(os.ttyname(writer))
    command = ["finetune", *map(str, arguments)]
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
    assert process.returncode in (0, 1, 2)
    return output.decode()


def lines_of(output: str) -> list[str]:
    """Return the lines that stay: of each, what is drawn last, without the codes."""
    kept = [line.rstrip("\r").split("\r")[-1] for line in output.split("\n")]
    return [CODES.sub("", line).rstrip() for line in kept]


def fit(colours: Path, *more: object) -> list[object]:
    return ["fit", "--data.root", colours, *FIT, "--trainer.max_epochs", 2, *more]


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 40])
def test_a_terminal_shows_a_bar_and_a_table(colours, tmp_path, width):
    output = shown(width, tmp_path, *fit(colours))
    lines = lines_of(output)
    is_wide = width == 80
    # the bar, which goes away
    assert re.search(r"epoch 1/2", CODES.sub("", output))
    assert re.search(r"loss \d\.\d{4}", CODES.sub("", output))
    assert "\x1b[?25h" in output and COLOR.search(output)
    # the table, which stays
    header = next(i for i, line in enumerate(lines) if line.split()[:1] == ["epoch"])
    titles = "train/loss val/loss val/accuracy" if is_wide else "loss val loss val acc"
    assert " ".join(lines[header].split()).startswith(f"epoch {titles}")
    rows = [line for line in lines if re.match(r" *[12]/2 ", line)]
    assert len(rows) == 2 and len({len(row) for row in (lines[header], *rows)}) == 1
    assert all(len(row) <= width for row in rows)
    assert all(len(re.findall(r"\d\.\d{4}\b", row)) == 3 for row in rows)
    assert not any("images/s" in row for row in rows)
    assert re.search(HEADLINE, " ".join(" ".join(lines).split())) or not is_wide
    assert "run in runs/fit/version_0" in lines
    (warning,) = (line for line in output.split("\n") if "val has only" in line)
    assert "\x1b[33m" in warning


@pytest.mark.slow
def test_no_color_is_respected_and_errors_are_red_without(tmp_path, colours):
    output = shown(80, tmp_path, *fit(colours), NO_COLOR="1")
    assert re.search(HEADLINE, output) and "epoch  train/loss" in CODES.sub("", output)
    assert not COLOR.search(output)
    assert "\x1b[31mfinetune: error: " in shown(80, tmp_path, "fit", "nowhere")
    assert not COLOR.search(shown(80, tmp_path, "fit", "nowhere", NO_COLOR="1"))


def run_in_pipes(colours: Path, folder: Path, **changes: str) -> Process:
    process = Process(["finetune", *map(str, fit(colours))], folder, environment(**changes))
    assert process.wait(300) == 0, process.stderr
    return process


def assert_plain(result: Process) -> None:
    assert "\x1b" not in result.stdout + result.stderr and "─" not in result.stdout
    epoch = (
        r"epoch 2/2  train/loss \d\.\d{4}  val/loss \d\.\d{4}  val/accuracy \d\.\d{4}  \d+ images/s"
    )
    assert re.search(rf"^{epoch}$", result.stderr, re.M)
    assert re.search(rf"^{HEADLINE}$", result.stdout, re.M)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("test/accuracy ")
    assert "run in runs/fit/version_0" in lines
    assert lines[-1] == "next: finetune predict runs/fit/version_0 IMAGES"


@pytest.mark.slow
def test_a_pipe_gets_plain_lines_even_if_color_is_forced(colours, tmp_path):
    assert_plain(run_in_pipes(colours, tmp_path, FORCE_COLOR="1"))


@pytest.mark.slow
def test_a_terminal_of_ci_gets_plain_lines(colours, tmp_path):
    lines = lines_of(shown(80, tmp_path, *fit(colours), CI="true"))
    assert any(re.match(r"epoch 2/2  train/loss ", line) for line in lines)
    assert "run in runs/fit/version_0" in lines


@pytest.mark.slow
def test_results_go_to_a_file_while_the_bar_is_on_the_terminal(colours, tmp_path):
    """rich would redirect them to the bar's stream."""
    out = tmp_path / "out.txt"
    screen = shown(80, tmp_path, *fit(colours), out=out)
    assert "epoch 1/2" in CODES.sub("", screen)
    assert re.search(rf"^{HEADLINE}$", out.read_text(), re.M)
    assert out.read_text().startswith("test/accuracy ") and "test/accuracy" not in screen


@pytest.mark.parametrize("width", range(20, 100))
@pytest.mark.parametrize("is_validated", [True, False])
def test_a_table_fits_the_terminal(width, is_validated):
    table = EpochTable(width, 100, "val/accuracy" if is_validated else None)
    values = {column.name: "9.9999" for column in table.columns} | {"epoch": "100/100"}
    assert len(table.header) == len(table.row(values)) == len(table.row({}))
    assert len(table.header) <= max(width, 30)
    names = [column.name for column in table.columns]
    assert names[0] == "epoch" and ("val/accuracy" in names) == is_validated
    # the control: nothing is dropped from a wide one
    assert len(names) == 4 + 2 * is_validated or width < 70


def test_a_value_that_is_missing_is_a_dash():
    assert EpochTable(80, None, None).row({"epoch": "3"}).split() == ["3", "-", "-", "-"]
