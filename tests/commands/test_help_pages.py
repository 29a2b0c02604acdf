"""The pages of `--help` are short, quick, and true to the real parser."""

import json
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
    for line in (
        ["fit"],
        ["fit", "--help", "all"],
        ["fit", "--data.help"],
        ["fit", "--", "--help"],
        ["parity", "-h"],
    ):
        assert help_page(line) is None


# Runs command lines in one process; its last line says of each how it ended, and what was imported by then.
_LINES = """
import json, sys
import finetune
finetune.__all__
codes, imported = [None], []
def look():
    imported.append(sorted({"PIL", "numpy", "pytorch_lightning", "torch"} & set(sys.modules)))
look()
from finetune.cli import main
for line in json.loads(sys.argv[1]):
    try:
        main(line)
    except SystemExit as ended:
        codes.append(ended.code)
    look()
print()
print(json.dumps([codes, imported]))
"""
BEFORE_TORCH = {
    "--help": 0,
    "--version": 0,
    "fit --help": 0,
    "fit x --epoch 3": 2,
    "fit --config hotdg.yaml": 2,
    "check nowhere": 2,
    "cache": 0,
    "serve some.ckpt --port 0 --precision 32": 2,
}


@pytest.mark.slow
def test_neither_the_package_nor_help_nor_an_error_line_waits_for_torch(tmp_path):
    (tmp_path / "some.ckpt").touch()
    lines = json.dumps([line.split() for line in [*BEFORE_TORCH, "fit --data.root nowhere"]])
    command = [sys.executable, "-c", _LINES, lines]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    codes, imported = json.loads(done.stdout.splitlines()[-1])
    assert codes == [None, *BEFORE_TORCH.values(), 1]
    for line, names in zip(["import finetune", *BEFORE_TORCH], imported[:-1], strict=True):
        is_light = line.startswith(("import", "fit", "--"))
        assert not names if is_light else not {"pytorch_lightning", "torch"} & set(names), line
    assert "torch" in imported[-1]  # the control: a right command line
    errors = done.stderr.splitlines()
    assert len(errors) == 5 and all(line.startswith("finetune: error: ") for line in errors)
    assert errors[2] == "finetune: error: 'nowhere' does not exist" and "precision: 32" in errors[3]
