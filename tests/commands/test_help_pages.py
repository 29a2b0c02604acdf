"""The pages of `--help` are short, quick, and true to the real parser."""

import subprocess
import sys

import pytest

from finetune.commands.given_arguments import taken_apart
from finetune.commands.help_pages import help_page, page
from finetune.commands.help_texts import OWN_PAGES, PAGES
from finetune.commands.known_flags import check_flags


@pytest.mark.parametrize("command", PAGES)
def test_it_is_one_screen_with_examples_that_are_understood(command):
    lines = page(command).splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 115
    examples = [line.split()[1:] for line in lines if line.startswith(f"  finetune {command} ")]
    assert len(examples) == (3 if command in OWN_PAGES else 5)
    for _, *rest in examples:
        check_flags(command, taken_apart(rest))


def test_which_command_lines_ask_for_it():
    assert help_page(["fit", "--help"]) == help_page(["fit", "pictures", "-h"]) == page("fit")
    for line in (["fit"], ["fit", "--help", "all"], ["fit", "--data.help"], ["fit", "--", "--help"], ["parity", "-h"]):
        assert help_page(line) is None


@pytest.mark.parametrize("line", [["fit", "--help"], ["fit", "x", "--epoch", "3"], ["fit", "--config", "hotdg.yaml"]])
def test_neither_help_nor_a_wrong_option_waits_for_torch(line, tmp_path):
    code = f"import sys; from finetune.cli import main\ntry: main({line!r})\n"
    code += "finally: print({'torch', 'numpy', 'pytorch_lightning'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.stdout.endswith("set()\n")
    assert (done.returncode, done.stderr.count("\n")) == ((0, 0) if "--help" in line else (2, 1))


def test_control_a_right_command_line_loads_torch(tmp_path):
    code = "import sys; from finetune.cli import main\ntry: main(['fit', '--data.root', 'nowhere'])\n"
    code += "finally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.stdout == "True\n"
